"""Commands of a deployment, one for each process, and the files to which the commands refer.

Commands contain the engines' own flags, and variables that `LaunchCommand.substitute` substitutes:
`${HOST_n}` (a host without a name), `${RUN_DIR}` (folder for the host's sockets and logs), `${PLAN_DIR}`
(folder with the deployment's files) and `${SECRET_FILE}` (a file of 32 bytes that is the same on all hosts).
The file `commands.txt` lists the command lines of all processes, for reading and copying.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Final, Literal, assert_never

from cornplug.host import reachable_address
from cornplug.planner.launch import connections as transfers
from cornplug.planner.launch import sglang_flags, vllm_flags
from cornplug.planner.launch.connections import (
    SECRET_ENV,
    ReplicaAddress,
    Transfer,
    accepts_remote_hosts,
    encoder_links,
    encoder_socket,
    hosts,
    replica_addresses,
)
from cornplug.planner.launch.engine_groups import (
    STORE_SOCKET,
    GroupContext,
    RouterCommand,
    bind_address,
    caches_for,
    context_for,
    is_cpu,
    role_of,
    route_entries,
    routers,
    store_size_flags,
)
from cornplug.planner.plan import Deployment
from cornplug.settings import GIB

_CLOSED_REMARK: Final = (
    "Other hosts can reach this service, so it starts only with --allow-anonymous (launch.allow_anonymous of "
    "the plan's input), or with --require-key and keys."
)
TRACE_CHUNK_TOKENS: Final = 16
"""Number of prompt tokens that one hash id in a trace of `vllm bench serve` represents."""
Kind = Literal["store", "encoder", "engine", "router", "external"]
FILE_NAME: Final = "commands.txt"
_VARIABLE: Final = re.compile(r"\$\{[A-Z0-9_]+\}")


@dataclass(frozen=True)
class LaunchCommand:
    """Command of one process."""

    group: str
    """Name of the replica group, or "store", "kv-server" or the router's name for other processes."""
    replica: int
    host: str
    argv: tuple[str, ...]
    """Program and arguments. Empty for a process that `launch` does not start, such as a generator on another
    server."""
    env: Mapping[str, str]
    kind: Kind
    port: int | None = None
    health: str | None = None
    """URL that returns status 200 to this host when the process is ready."""
    socket: str | None = None
    """Unix socket that exists when the process is ready, for a process without a URL."""
    rank: int = 0
    """Rank of the process in its replica. Ranks above 0 run on additional nodes and do not serve requests."""
    cores: tuple[int, ...] = ()
    """Cores on which the process runs. Empty if it may run on all cores."""
    gpus: tuple[int, ...] = ()
    """Numbers of the host's GPUs that the process uses."""
    share: float = 1.0
    """Share of each of these GPUs that the process uses."""
    settings: str = ""
    """Text of the settings file that the process reads at startup, if a change of the text requires a
    restart."""
    shares_gpu: bool = False
    """Whether other processes use the same GPU. Each of these processes takes a share of the free memory, so
    the next process is started only when this process is ready.
    """
    remarks: tuple[str, ...] = field(default=())

    @property
    def url(self) -> str | None:
        return None if self.port is None else f"http://{self.host}:{self.port}"

    def substitute(self, values: Mapping[str, str]) -> LaunchCommand:
        """Return the command with `values` substituted for its variables ("HOST_1" -> "10.0.0.1").

        Variables without a value are not changed.
        """

        def fill(text: str) -> str:
            return Template(text).safe_substitute(values)

        return replace(
            self,
            host=fill(self.host),
            argv=tuple(map(fill, self.argv)),
            env={name: fill(value) for name, value in self.env.items()},
            health=None if self.health is None else fill(self.health),
            socket=None if self.socket is None else fill(self.socket),
        )


def name_of(command: LaunchCommand) -> str:
    """Return the name of a process for logs and messages.

    The name consists of group and replica, in characters that are allowed in file names.
    """
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", command.group).strip("-")
    if command.kind in ("store", "router"):
        return plain
    return f"{plain}-{command.replica}" + (f"-rank{command.rank}" if command.rank else "")


def commands(deployment: Deployment, *, transfer: Transfer = "nixl") -> list[LaunchCommand]:
    """Return the commands of all processes of a deployment, in start order.

    Raises ConfigError if replicas are not placed, or if an engine has no settings.
    """
    placed = replica_addresses(deployment)
    links = encoder_links(deployment, placed)
    contexts = [context_for(deployment, site, placed, transfer=transfer, links=links) for site in placed]
    engines = [
        _engine(site, its)
        for site, its in zip(placed, contexts, strict=True)
        if site.group.engine != "cornplug"
    ]
    servers = [
        *_stores(deployment, placed, contexts),
        *_kv_servers(placed, transfer),
        *_encoders(deployment, placed, contexts),
        *engines,
    ]
    if any(its.sharing.encoder.urls for its in contexts):
        servers = [_with_secret(one) for one in servers]
    front = routers(deployment, placed, transfer=transfer)
    return [*servers, *(_router(one) for one in front if one.argv)]


def _with_secret(command: LaunchCommand) -> LaunchCommand:
    """Add the hosts' common secret to a command that runs cornplug or loads its plugin.

    Processes on the same host use this secret for authentication too.
    """
    if not any("cornplug" in word.lower() for word in command.argv):
        return command
    return replace(command, env={**command.env, **SECRET_ENV})


def files(
    deployment: Deployment, *, transfer: Transfer = "nixl", unready_urls: Collection[str | None] = ()
) -> dict[str, str]:
    """Return the text of the files to which the commands refer, by name.

    `unready_urls` contains addresses that do not serve requests yet, which routes.json omits.
    """
    placed = replica_addresses(deployment)
    table = route_entries(
        deployment, routers(deployment, placed, transfer=transfer), unready_urls=unready_urls
    )
    found = {"routes.json": json.dumps(table, indent=2) + "\n"}
    if deployment.reservations:
        found["qos.toml"] = _qos_toml(deployment)
    if _has_namespaces(deployment):
        found["store.toml"] = _store_toml(deployment)
    return found


def _stores(
    deployment: Deployment, placed: Sequence[ReplicaAddress], contexts: Sequence[GroupContext]
) -> list[LaunchCommand]:
    wanting = _store_hosts(deployment, placed, contexts)
    env = {"CORNPLUG_CONFIG": "${PLAN_DIR}/store.toml"} if _has_namespaces(deployment) else {}
    return [
        LaunchCommand(
            "store",
            number,
            host,
            (
                "cornplug",
                "serve-store",
                "--socket",
                STORE_SOCKET,
                *store_size_flags(deployment),
                *deployment.store_flags,
            ),
            env,
            "store",
            socket=STORE_SOCKET,
            settings=_store_toml(deployment).partition("\n")[2] if _has_namespaces(deployment) else "",
        )
        for number, host in enumerate(wanting)
    ]


def _store_hosts(
    deployment: Deployment, placed: Sequence[ReplicaAddress], contexts: Sequence[GroupContext]
) -> dict[str, None]:
    """Return the hosts that need a store.

    These are the hosts with engines that share entries, and the hosts with encoders whose embeddings are
    cached.
    """
    return {
        site.host: None
        for site, its in zip(placed, contexts, strict=True)
        if its.sharing.is_enabled
        or (
            site.group.engine == "cornplug"
            and caches_for(deployment, "embedding", set(site.group.components))
        )
    }


def _kv_servers(placed: Sequence[ReplicaAddress], transfer: Transfer) -> list[LaunchCommand]:
    """Return a command of LMCache's server for each host of vLLM pairs that transfer KV through LMCache."""
    if transfer != "lmcache":
        return []
    pairs = [s for s in placed if s.group.engine == "vllm" and role_of(s.group) != "PD" and s.group.kv]
    found = []
    for number, host in enumerate(dict.fromkeys(s.host for s in pairs)):
        local = [s.group for s in pairs if s.host == host]
        # Reserve a buffer for each replica with all its ranks, because the server's pages contain all heads.
        size = sum(transfers.buffer_bytes(group.kv) for group in local if group.kv) / GIB
        argv, env = tuple(transfers.lmcache_server(size)), {"PYTHONHASHSEED": "0"}
        found.append(
            LaunchCommand(
                "kv-server", number, host, argv, env, "store", health=_health(transfers.LMCACHE_HTTP_PORT)
            )
        )
    return found


def _encoders(
    deployment: Deployment, placed: Sequence[ReplicaAddress], contexts: Sequence[GroupContext]
) -> list[LaunchCommand]:
    """Return the commands of the encoder services. The replicas of a group on one host are one service."""
    stored = _store_hosts(deployment, placed, contexts)
    by_service: dict[tuple[str, str], list[ReplicaAddress]] = {}
    for site in placed:
        if site.group.engine == "cornplug":
            by_service.setdefault((site.group.name, site.host), []).append(site)
    asked = [s.group.engine == "sglang" for s in placed]
    named = [url for a, by in zip(contexts, asked, strict=True) if by for url in a.encoder_urls]
    return [
        _encoder(
            deployment,
            local,
            number=number,
            store=host in stored,
            sglang=any(url == local[0].url or url.startswith(f"{local[0].url}/") for url in named),
        )
        for number, ((_, host), local) in enumerate(by_service.items())
    ]


def _encoder(
    deployment: Deployment, local: Sequence[ReplicaAddress], *, number: int, store: bool, sglang: bool
) -> LaunchCommand:
    site = local[0]
    devices = sorted({device for one in local for device in one.devices})
    cpu = is_cpu(site.group)
    argv = ["cornplug", "encoder"]
    for model in site.group.encoder_models or [site.group.model]:
        argv += ["--model", model]
    argv += [
        "--device",
        "cpu" if cpu else "cuda",
        "--host",
        bind_address(deployment, site.host),
        "--port",
        str(site.port),
    ]
    argv += ["--allow-anonymous"] if deployment.allow_anonymous else []
    argv += ["--names", site.host]
    argv += ["--socket", encoder_socket(site)]
    argv += ["--replicas", str(len(devices))] if len(devices) > 1 else []
    argv += ["--threads", "1"] if cpu else []
    argv += ["--sglang"] if sglang else []
    argv += ["--store-socket", STORE_SOCKET] if store else ["--no-store"]
    env = {} if cpu else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    if deployment.reservations:
        env["CORNPLUG_CONFIG"] = "${PLAN_DIR}/qos.toml"
    argv += site.group.flags or ()
    env |= site.group.env
    shared = len(local) - len(devices)
    bound = bind_address(deployment, site.host)
    # A bind address that is a variable belongs to a host without a name, on which `cornplug launch` runs.
    closed = not deployment.allow_anonymous and not bound.startswith("$") and accepts_remote_hosts(bound)
    remark = (
        f"{shared} of the {len(local)} replicas share a device with another replica, so one process serves "
        f"all {len(local)}"
    )
    return LaunchCommand(
        site.group.name,
        number,
        site.host,
        tuple(argv),
        env,
        "encoder",
        site.port,
        _health(site.port, bind_address(deployment, site.host)),
        cores=tuple(devices) if cpu else (),
        gpus=() if cpu else tuple(devices),
        share=site.group.share,
        settings=_qos_toml(deployment).partition("\n")[2] if deployment.reservations else "",
        shares_gpu=site.group.share < 1,
        remarks=(*([remark] if shared else []), *([_CLOSED_REMARK] if closed else [])),
    )


def _engine(site: ReplicaAddress, context: GroupContext) -> LaunchCommand:
    group = site.group
    argv: list[str] = []
    env: dict[str, str] = {}
    match group.engine:
        case "vllm":
            argv, env = vllm_flags.argv(site, context), vllm_flags.env(site, context)
        case "sglang":
            argv, env = sglang_flags.argv(site, context), sglang_flags.env(site, context)
        case "external":
            devices = ",".join(map(str, site.devices))
            env = {} if is_cpu(group) else {"CUDA_VISIBLE_DEVICES": devices}
            argv = [
                word.replace("{port}", str(site.port)).replace("{host}", context.bind_address)
                for word in group.command
            ]
        case "cornplug":
            raise ValueError("encoders have commands of their own")
        case _:
            assert_never(group.engine)
    return LaunchCommand(
        group.name,
        site.replica,
        site.host,
        tuple(argv),
        {**env, **group.env},
        "external" if group.engine == "external" else "engine",
        site.port,
        None if site.rank or not argv else _health(site.port, context.bind_address, group.health),
        rank=site.rank,
        cores=site.devices if is_cpu(group) and argv else (),
        gpus=() if is_cpu(group) else site.devices,
        share=group.share,
        shares_gpu=group.share < 1,
        remarks=_remarks(site, context),
    )


def _remarks(site: ReplicaAddress, context: GroupContext) -> tuple[str, ...]:
    group = site.group
    found = []
    if group.engine == "external" and not group.command:
        found.append(f"Start your own server of {group.model} here; it is planned for port {site.port}.")
    elif "G" in group.tasks and group.engine != "external":
        found.append("This engine does not serve the generator. Start the generator's own server next to it.")
    if group.engine == "vllm" and context.role != "PD" and context.sharing.kv:
        found.append("KV uses two connectors, so they are configured in the long form.")
    return tuple(found)


def _router(router: RouterCommand) -> LaunchCommand:
    return LaunchCommand(
        router.name,
        0,
        router.host,
        router.argv,
        {},
        "router",
        router.port,
        _health(router.port, router.bind_address),
        remarks=(f"Planned: {router.weights_text}",),
    )


def _health(port: int, bound: str = "127.0.0.1", path: str = "/health") -> str:
    return f"http://{reachable_address(bound)}:{port}{path}"


def _qos_toml(deployment: Deployment) -> str:
    """Return a settings file with the classes of service, for the encoder service and for admission
    control."""
    lines = [f"# Classes of service of the plan {deployment.name!r}."]
    for one in deployment.reservations:
        lines += ["", f"[qos.classes.{json.dumps(one.qos)}]", f"share = {_round_down(one.share)}"]
        lines += [f"priority = {one.priority}"]
        lines += [] if one.deadline_s is None else [f"deadline_s = {one.deadline_s:.4g}"]
        lines += [f"apps = {json.dumps(one.apps)}"] if one.apps else []
    return "\n".join(lines) + "\n"


def _store_toml(deployment: Deployment) -> str:
    """Return a settings file with the store's namespaces, one for each application with a namespace."""
    lines = ["# Namespaces of a plan's applications."]
    for app in deployment.applications:
        if app.namespace is not None:
            lines += ["", f"[store.namespaces.{json.dumps(app.name)}]"]
            values = app.namespace.model_dump(exclude_none=True)
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _has_namespaces(deployment: Deployment) -> bool:
    return any(app.namespace is not None for app in deployment.applications)


def _round_down(share: float) -> float:
    """Round a share down to four digits, because the sum of all classes' shares must not exceed 1."""
    return math.floor(share * 1e4) / 1e4


def write(deployment: Deployment, folder: Path, *, transfer: Transfer = "nixl") -> list[Path]:
    """Write commands.txt and the files to which its commands refer, and return the paths of all files."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {FILE_NAME: render(deployment, transfer=transfer), **files(deployment, transfer=transfer)}
    for name, content in found.items():
        (folder / name).write_text(content)
    return [folder / name for name in found]


def render(deployment: Deployment, *, transfer: Transfer = "nixl") -> str:
    """Return the text of commands.txt: the commands of each host in start order, and then the routers."""
    every = commands(deployment, transfer=transfer)
    lines = [
        f"# Processes of the plan {_one_line(deployment.name)!r}, in start order.",
        "# `cornplug launch plan.json` starts them, waits until they are ready, and stops them in order.",
        *_variables(every),
    ]
    for host in dict.fromkeys(hosts(deployment).values()):
        local = [c for c in every if c.host == host and c.kind != "router"]
        lines += ["", f"# Host {host.strip('${}')}", *_lines(local)] if local else []
    routers = [c for c in every if c.kind == "router"]
    lines += ["", "# Routers, to be started when all hosts are ready", *_lines(routers)] if routers else []
    return "\n".join(lines) + "\n"


def shell_line(command: LaunchCommand) -> str:
    """Return a command as a line for a shell, with its environment, cores and arguments."""
    words = ["env", *(f"{name}={quote(value)}" for name, value in sorted(command.env.items()))]
    words = words if command.env else []
    if command.cores:
        words += ["taskset", "--cpu-list", ",".join(map(str, command.cores))]
    return " ".join([*words, *map(quote, command.argv)])


def quote(word: str) -> str:
    """Quote a word for a shell, so that the shell expands only the variables of commands in the word."""
    if not _VARIABLE.search(word):
        return shlex.quote(word)
    parts = _VARIABLE.split(word)
    escaped = [re.sub(r'([\\\\"`$])', r"\\\1", part) for part in parts]
    filled = "".join(a + b for a, b in zip(escaped, [*_VARIABLE.findall(word), ""], strict=True))
    return f'"{filled}"'


def unresolved_hosts(command: LaunchCommand) -> list[str]:
    """Return the names of hosts ("HOST_1") for which the command still contains variables."""
    texts = (*command.argv, *command.env.values(), command.health or "")
    found = {name.strip("${}") for text in texts for name in _VARIABLE.findall(text)}
    return sorted(name for name in found if name.startswith("HOST_"))


def _variables(all_commands: Sequence[LaunchCommand]) -> Iterator[str]:
    texts = [text for c in all_commands for text in (*c.argv, *c.env.values())]
    known = {
        "RUN_DIR": "a folder for sockets, the same for all processes of a host",
        "PLAN_DIR": "the folder of this file",
        "SECRET_FILE": "a file of 32 bytes, the same on all hosts",
        **dict.fromkeys(sorted({n for c in all_commands for n in unresolved_hosts(c)}), "a host's address"),
    }
    used = [name for name in known if any(f"${{{name}}}" in text for text in texts)]
    if used:
        yield "# To run a command by hand, first set these variables:"
        yield from (f"#   {name}: {known[name]}" for name in used)
    if "SECRET_FILE" in used:
        yield "# Engines use encoder services on other hosts. The secret seals their messages."
        yield "# Create it once:"
        yield "#   head -c 32 /dev/urandom > secret && chmod 600 secret"
        yield "# Copy it to each host with its mode (scp -p), and run there: pip install 'cornplug[remote]'"


def _lines(some: Sequence[LaunchCommand]) -> Iterator[str]:
    for command in some:
        yield "\n".join(["", f"# {name_of(command)}", *(f"# {_one_line(r)}" for r in command.remarks)])
        if command.argv:
            yield shell_line(command)


def _one_line(text: str) -> str:
    """Return a text on a single line, for a comment."""
    return " ".join(text.split())
