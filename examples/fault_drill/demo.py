"""A deployment loses an encoder, the store, an engine and the far store, each by kill -9, while clients ask.

    script/demo fault_drill

Exit status: 0 when no request failed, each part was back within 400 s, and the launcher gave up none; else 1.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clients import PacedClients
from parts import DeploymentPart, child, total
from rich import box
from rich.console import Console
from rich.table import Table

from devkit import checkpoints
from devkit.far_servers import RedisServer, redis_program

HERE: Final = Path(__file__).parent
ENGINES: Final = ("http://127.0.0.1:8300", "http://127.0.0.1:8301")
TOWER: Final = "http://127.0.0.1:8302"
STORE: Final = "http://127.0.0.1:8398"
FAR_PORT: Final = 8399
START_S: Final = 900.0
BACK_S: Final = 400.0
CALM_S: Final = 5.0
"""Between the return of one part and the loss of the next."""
FAR_DOWN_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLoss:
    """One line of the timeline; times are seconds of the monotonic clock."""

    title: str
    lost_s: float
    back_s: float | None
    answered: int
    elsewhere: int
    slowest_s: float
    failed: int


class FaultDrill:
    """Losses one after the other, and the timeline of them."""

    def __init__(
        self, clients: PacedClients, console: Console, began_s: float, back_s: float = BACK_S
    ) -> None:
        self.losses: list[PartLoss] = []
        self._clients = clients
        self._console = console
        self._began_s = began_s
        self._back_s = back_s

    def say(self, text: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - self._began_s:6.1f} s[/]  {text}")

    def lose(self, part: DeploymentPart) -> None:
        """Kill a part, and wait until it works again, or the time for that is over."""
        answers, failures = len(self._clients.answers), len(self._clients.failures)
        lost_s = time.monotonic()
        pid = part.kill()
        self.say(f"[red]kill -9[/] {part.title} (process {pid})")
        part.restart()
        back_s = part.wait_back(pid, lost_s, self._back_s)
        if back_s is None:
            self.say(f"[bold red]not back[/] {part.title}, after {self._back_s:g} s")
        else:
            self.say(f"[green]back[/]    {part.title}, after {back_s - lost_s:.1f} s")
        seen = self._clients.answers[answers:]
        self.losses.append(
            PartLoss(
                title=part.title,
                lost_s=lost_s - self._began_s,
                back_s=None if back_s is None else back_s - self._began_s,
                answered=len(seen),
                elsewhere=sum(answer.elsewhere for answer in seen),
                slowest_s=max((answer.seconds for answer in seen), default=0.0),
                failed=len(self._clients.failures) - failures,
            )
        )

    def faults(self) -> list[str]:
        """The promises that were not kept."""
        found = [
            f"{loss.title} was not back in {self._back_s:g} s" for loss in self.losses if loss.back_s is None
        ]
        found += [
            f"no request was answered while {one.title} was lost" for one in self.losses if not one.answered
        ]
        return found + [f"request failed: {reason}" for _, reason in self._clients.failures]


def table(losses: list[PartLoss]) -> Table:
    """The timeline."""
    made = Table(title="Losses by kill -9, under load", box=box.SIMPLE_HEAD)
    made.add_column("lost")
    for column in ("at s", "back at s", "seconds", "answered", "by the other engine", "slowest s", "failed"):
        made.add_column(column, justify="right")
    for one in losses:
        back = ("-", "-") if one.back_s is None else (f"{one.back_s:.1f}", f"{one.back_s - one.lost_s:.1f}")
        counts = (str(one.answered), str(one.elsewhere), f"{one.slowest_s:.1f}", str(one.failed))
        made.add_row(one.title, f"{one.lost_s:.1f}", *back, *counts)
    return made


def parts(launcher: int, far: RedisServer, clients: PacedClients) -> list[DeploymentPart]:
    """In the order of their loss."""

    def answered(url: str, since_s: float) -> bool:
        return any(one.url == url and one.end_s > since_s for one in reversed(clients.answers[-50:]))

    written_before = 0.0

    def restart_far() -> None:
        """As the operator of the far store would: the launch does not look after it."""
        nonlocal written_before
        far.wait_until_ended(10)
        time.sleep(FAR_DOWN_S)
        far.start()
        written_before = total(STORE, "cornplug_store_far_writes_total", outcome="written")

    def far_takes_entries(_: float) -> bool:
        """Whether the store has written an entry to it since its restart."""
        up = total(STORE, "cornplug_store_far_up") == 1
        return up and total(STORE, "cornplug_store_far_writes_total", outcome="written") > written_before

    def port(url: str) -> str:
        return url.rpartition(":")[2]

    return [
        DeploymentPart(
            title="encoder service",
            pid=lambda: child(launcher, ["encoder", "--port", port(TOWER)]),
            works=lambda _: total(TOWER, "cornplug_encoder_tower_passes_total") > 0,
        ),
        DeploymentPart(
            title="store",
            pid=lambda: child(launcher, ["serve-store"]),
            works=lambda _: total(STORE, "cornplug_store_hits_total") > 0,
        ),
        DeploymentPart(
            title="engine llm-b",
            pid=lambda: child(launcher, ["serve", "--port", port(ENGINES[1])]),
            works=lambda since_s: answered(ENGINES[1], since_s + 1.0),
        ),
        DeploymentPart(
            title="far store",
            pid=lambda: far.pid if far.is_alive() else None,
            works=far_takes_entries,
            restart=restart_far,
        ),
    ]


@contextmanager
def launched(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The launcher and its run folder; ended in order on leaving."""
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(os.urandom(32))
    # A user's own settings could name a user's own store.
    env = {k: v for k, v in os.environ.items() if not k.startswith("CORNPLUG_") or k == "CORNPLUG_VLLM"}
    env |= {
        "CORNPLUG_STORE_SECRET_FILE": str(secret),
        "CORNPLUG_STORE_LOAD_WHEN": "always",
        "HF_HUB_OFFLINE": "1",
    }
    run_dir = folder / "run"
    line = ["launch", str(HERE / "apps.toml"), "--run-dir", str(run_dir)]
    with (folder / "launch.log").open("wb") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "cornplug.cli", *line], stdout=log, stderr=log, env=env
        )
    try:
        yield launcher, run_dir
    finally:
        launcher.send_signal(signal.SIGTERM)
        try:
            launcher.wait(300)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()


def wait_for(
    what: str, ready: Callable[[], bool], launcher: subprocess.Popen[bytes], deadline_s: float
) -> None:
    """Raises RuntimeError when the launcher ends, or time is over."""
    began_s = time.monotonic()
    while not ready():
        if launcher.poll() is not None or time.monotonic() - began_s > deadline_s:
            raise RuntimeError(f"{what}: not within {deadline_s:g} s, or the launcher has ended")
        time.sleep(0.5)


def shares(clients: PacedClients) -> bool:
    """Whether each part has done its work once."""
    return (
        {answer.url for answer in clients.answers} == set(ENGINES)
        and total(TOWER, "cornplug_encoder_tower_passes_total") > 0
        and total(STORE, "cornplug_store_hits_total") > 0
        and total(STORE, "cornplug_store_far_writes_total", outcome="written") > 0
    )


def drill(folder: Path, program: str, console: Console) -> bool:
    """Run it, print the timeline; whether all is as promised."""
    with ExitStack() as ends:
        far = ends.enter_context(RedisServer(program, folder, port=FAR_PORT))
        launcher, run_dir = ends.enter_context(launched(folder))
        console.print("starting a far store, a store, an encoder service and two engines")
        wait_for("a launch that serves", (run_dir / "current-plan.json").exists, launcher, START_S)
        clients = PacedClients(run_dir / "routes.json")
        ends.callback(clients.stop)
        clients.start()
        wait_for("a deployment that shares", lambda: shares(clients), launcher, BACK_S)
        run = FaultDrill(clients, console, time.monotonic())
        run.say(f"{len(clients.answers)} requests answered; all parts work")
        try:
            for part in parts(launcher.pid, far, clients):
                time.sleep(CALM_S)
                run.lose(part)
            time.sleep(CALM_S)
        finally:
            clients.stop()
            console.print(table(run.losses))
            console.print(f"{len(clients.answers)} requests answered, {len(clients.failures)} failed")
        faults = run.faults()
    if launcher.returncode != 0:
        faults.append(f"the launcher ended with status {launcher.returncode}: it gave a process up")
    for fault in faults:
        console.print(f"[bold red]NOT as promised:[/] {fault}")
    console.print("[bold red]failed" if faults else "[bold green]all as promised")
    return not faults


def main() -> int:
    """0 when all was as promised."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    program = redis_program()
    if program is None:
        console.print("fault_drill: no valkey-server and no redis-server here: run script/setup")
        return 2
    if not (HERE / "models" / "drill" / "config.json").exists():
        checkpoints.qwen2_vl(HERE / "models" / "drill")
    with tempfile.TemporaryDirectory(prefix="cp-") as name:
        folder = Path(name)
        try:
            return 0 if drill(folder, program, console) else 1
        except RuntimeError as e:
            console.print(f"[bold red]the drill could not go on:[/] {e}", soft_wrap=True)
            for log in (folder / "launch.log", *sorted(folder.glob("run/*.log"))):
                if log.exists():
                    console.print(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}", markup=False)
            return 1


if __name__ == "__main__":
    sys.exit(main())
