"""Pods of the Helm chart without a cluster: a container's layout in namespaces, as the kubelet makes it.

    root      the machine's own file system below an overlay; read-only where the pod says so
    volumes   hostPath, emptyDir, Secret and PersistentVolumeClaim, with the owners and modes of Kubernetes
    process   the image's entry point and variables, the pod's arguments, user, group and capabilities
    probes    commands inside the pod, HTTP from another network namespace

Mount, process and IPC namespaces are the pod's own unless it asks for the host's. seccomp, control groups and
NetworkPolicies are not made.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from cornplug.processes import ManagedProcess
from devkit.processes import wait_until

TREE: Final = Path(__file__).parents[2]
_MOST_S: Final = 300.0
"""Of a startup probe: those of GPUs' checkpoints are longer."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node, as its pods see it: `folder` has what they share."""

    folder: Path
    secrets: Mapping[str, Mapping[str, bytes]]
    claims: Mapping[str, Path]
    hosts: Mapping[str, str] = field(default_factory=dict)
    """Names that the cluster's DNS would resolve."""

    def path(self, of_pod: str) -> Path:
        return self.folder / of_pod.lstrip("/")

    def secret_file(self, name: str, key: str) -> Path:
        """A file of root's with one key of a Secret."""
        file = self.folder / "secrets" / name / key
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
        file.write_bytes(self.secrets[name][key])
        return file


def image(name: str) -> tuple[list[str], dict[str, str]]:
    """Entry point and variables of the image that deploy/docker/NAME.Dockerfile makes, but for PATH."""
    text = (TREE / "deploy" / "docker" / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    env = dict(re.findall(r"(\w+)=(\S+)", " ".join(re.findall(r"^ENV (.*)$", text, re.MULTILINE))))
    env.pop("PATH", None)
    return json.loads(entry), env


class Pod(ManagedProcess):
    """One container of a pod's spec, on `node`.

    Args:
        command: In place of the image's entry point and the container's arguments.
        enter: A command that runs it in a network namespace; none: in a new one without a network.
        address: Where HTTP probes reach the pod.
    """

    def __init__(
        self,
        name: str,
        spec: Mapping[str, Any],
        container: Mapping[str, Any],
        node: Node,
        *,
        command: Sequence[str] = (),
        enter: Sequence[str] = (),
        address: str = "",
    ) -> None:
        entry, env = image(re.sub(r".*cornplug-(\w+):.*", r"\1", container["image"]))
        self.container = container
        self._spec, self._node, self._address = spec, node, address
        self._env = {**env, **self._variables()}
        words = command or container.get("command") or [*entry, *container.get("args", ())]
        shared = {"--pid": "hostPID", "--ipc": "hostIPC"}
        own = [flag for flag, host in shared.items() if not spec.get(host)]
        namespaces = ["unshare", "--mount", "--fork", "--kill-child", *own, *([] if enter else ["--net"])]
        folder = node.folder / "pods" / name
        folder.mkdir(parents=True, exist_ok=True)
        script = "\n".join(self._script(folder, words, alone=not enter))
        super().__init__(
            [*enter, *namespaces, "--propagation", "private", "bash", "-c", script],
            log=node.folder / f"{name}.log",
            name=f"pod {name}",
        )

    # -- its process --

    @property
    def first(self) -> int:
        """The process that is 1 inside."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == self.pid:
                return int(stat.parent.name)
        raise ProcessLookupError(f"{self.name} has ended; {self.log_excerpt()}")

    def terminate(self) -> None:
        """SIGTERM to the container's first process, as the kubelet sends it."""
        if self.is_alive():
            os.kill(self.first, signal.SIGTERM)

    def grace_s(self) -> float:
        """Seconds that Kubernetes leaves between SIGTERM and SIGKILL."""
        pause = self.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        return float(self._spec["terminationGracePeriodSeconds"] - pause)

    def run(self, *command: str, timeout_s: float = 60) -> str:
        """Output of a command beside the process, as `kubectl exec`. Raises CalledProcessError."""
        namespaces = ["--mount", "--pid", "--ipc", "--net", "--root", "--wd"]
        inside = ["nsenter", "--target", str(self.first), *namespaces, "--", *self._as_user(command)]
        done = subprocess.run(inside, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done.stdout

    # -- its probes --

    def passes(self, probe: str) -> bool:
        """Whether a probe of the container succeeds now, in the time that it has."""
        asked = self.container[probe]
        timeout_s = asked.get("timeoutSeconds", 1)
        try:
            if "exec" in asked:
                self.run(*asked["exec"]["command"], timeout_s=timeout_s)
                return True
            ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
            url = f"http://{self._address}:{ports[asked['httpGet']['port']]}{asked['httpGet']['path']}"
            return 200 <= httpx.get(url, timeout=timeout_s, trust_env=False).status_code < 400
        except (subprocess.SubprocessError, ProcessLookupError, httpx.TransportError):
            return False

    def await_ready(self) -> None:
        """Wait until the startup probe passes, and the others in the tries that they have."""
        startup = self.container["startupProbe"]
        most_s = min(startup["failureThreshold"] * startup["periodSeconds"], _MOST_S)
        began_s = time.monotonic()

        def started() -> bool:
            self.check_alive("before its startup probe passed")
            return self.passes("startupProbe")

        try:
            wait_until(started, deadline_s=most_s, what=f"{self.name}'s startup probe")
        except TimeoutError as e:
            raise TimeoutError(f"{e}; {self.log_excerpt()}") from e
        for probe in ("readinessProbe", "livenessProbe"):
            tries = self.container[probe].get("failureThreshold", 3)
            passed = any(self.passes(probe) for _ in range(tries))
            assert passed, f"{probe} after {time.monotonic() - began_s:.0f} s; {self.log_excerpt()}"

    # -- its layout --

    def _variables(self) -> dict[str, str]:
        found = {}
        for one in self.container.get("env", ()):
            if "value" in one:
                found[one["name"]] = one["value"]
            else:
                key = one["valueFrom"]["secretKeyRef"]
                found[one["name"]] = self._node.secrets[key["name"]][key["key"]].decode()
        return found

    def _user(self) -> int:
        security = {**self._spec["securityContext"], **self.container.get("securityContext", {})}
        return int(security["runAsUser"])

    def _as_user(self, command: Sequence[str]) -> list[str]:
        """The command with the container's user, capabilities and variables."""
        group = self._spec["securityContext"]["fsGroup"]
        kept = self.container["securityContext"]["capabilities"].get("add", ())
        bounding = ",".join(["-all", *(f"+{name.lower()}" for name in kept)])
        paths = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        env = {
            "HOME": "/home/cornplug",
            **self._env,
            "PATH": paths,
            "PYTHONPATH": str(TREE),
            "OMP_NUM_THREADS": "1",
        }
        user = str(self._user())
        return [
            *("setpriv", "--reuid", user, "--regid", user, "--groups", str(group)),
            *("--inh-caps=-all", f"--bounding-set={bounding}", "--no-new-privs"),
            *("env", "-i", *(f"{name}={value}" for name, value in env.items()), *command),
        ]

    def _script(self, folder: Path, command: Sequence[str], *, alone: bool) -> Iterator[str]:
        root, quote = shlex.quote(str(folder / "root")), shlex.quote
        yield "set -e"
        yield f"mount -t tmpfs -o mode=755 tmpfs {quote(str(folder))}"
        yield f"cd {quote(str(folder))} && mkdir upper work root"
        yield f"mount -t overlay -o lowerdir=/,upperdir={folder}/upper,workdir={folder}/work overlay {root}"
        # The interpreter may lie in a folder of root's: in the image it does not.
        for path in {*Path(sys.executable).resolve().parents, *Path(sys.prefix).parents, *TREE.parents}:
            if path.stat().st_mode & 0o005 != 0o005:
                yield f"chmod o+rx {root}{quote(str(path))}"
        user = self._spec["securityContext"]["runAsUser"]
        yield f"echo cornplug:x:{user}:{user}::/home/cornplug:/bin/sh >> {root}/etc/passwd"
        for name, address in self._node.hosts.items():
            yield f"echo {address} {name} >> {root}/etc/hosts"
        yield f"install -d -m 0755 -o {user} -g {user} {root}/home/cornplug"
        yield f"mount -t proc proc {root}/proc"
        yield f"mount --rbind /sys {root}/sys && mount --rbind /dev {root}/dev"
        volumes = {volume["name"]: volume for volume in self._spec["volumes"]}
        for mount in self.container["volumeMounts"]:
            target = root + quote(mount["mountPath"])
            yield f"mkdir -p {target}"
            yield from self._volume(volumes[mount["name"]], target)
            if mount.get("readOnly"):
                yield f"mount -o remount,bind,ro {target}"
        if self.container["securityContext"].get("readOnlyRootFilesystem"):
            yield f"mount -o remount,ro {root}"
        if alone:
            yield "ip link set lo up"
        yield f"exec chroot {root} {shlex.join(self._as_user(command))}"

    def _volume(self, volume: Mapping[str, Any], target: str) -> Iterator[str]:
        """Commands that mount a volume, as the kubelet leaves it for a pod with an fsGroup."""
        group, quote = self._spec["securityContext"]["fsGroup"], shlex.quote
        if (empty := volume.get("emptyDir")) is not None:
            size = {"Mi": "m", "Gi": "g"}.get(empty.get("sizeLimit", "")[-2:], "")
            limit = f",size={empty['sizeLimit'][:-2]}{size}" if size else ""
            yield f"mount -t tmpfs -o mode=2777,gid={group}{limit} tmpfs {target}"
        elif (host := volume.get("hostPath")) is not None:
            source = self._node.path(host["path"])
            if host["type"] == "DirectoryOrCreate":
                yield f"[ -d {quote(str(source))} ] || install -d -m 0755 {quote(str(source))}"
            yield f"mount --bind {quote(str(source))} {target}"
        elif (secret := volume.get("secret")) is not None:
            yield f"mount -t tmpfs -o mode=2755,gid={group} tmpfs {target}"
            yield f"mkdir {target}/..1 && ln -s ..1 {target}/..data"
            for item in secret["items"]:
                source = self._node.secret_file(secret["secretName"], item["key"])
                file = f"{target}/..1/{item['path']}"
                yield f"cp {quote(str(source))} {file}"
                yield f"chgrp {group} {file} && chmod {secret['defaultMode']:o} {file}"
                yield f"ln -s ..data/{item['path']} {target}/{item['path']}"
        else:
            claim = volume["persistentVolumeClaim"]["claimName"]
            yield f"mount --bind {quote(str(self._node.claims[claim]))} {target}"
