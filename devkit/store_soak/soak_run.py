"""The processes of a soak: one daemon, its clients, a far store, their faults, and looks at their memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from cornplug.config import StoreConfig
from cornplug.errors import StoreUnavailable
from cornplug.store.client import PoolStore
from devkit.far_servers import RedisServer, redis_program
from devkit.store_soak.soak_client import ClientReport
from devkit.store_soak.soak_faults import STEADY_CLIENT, PlannedFault
from devkit.store_soak.soak_growth import ProcessSample, sample_process

_SAMPLE_S: Final = 0.5
_START_S: Final = 120.0
_SETTLE_S: Final = 20.0
_CLIENT_END_S: Final = 30.0


@dataclass(frozen=True)
class SoakOptions:
    """What to run."""

    work: Path
    duration_s: float
    clients: int = 8
    seed: int = 1
    size_bytes: int = 128 << 20
    disk_bytes: int = 128 << 20
    """0: the store has no disk. Memory and disk do not hold all entries: some are left to the far store."""
    far_bytes: int = 256 << 20
    """Of a Redis or Valkey server; 0: there is none."""


@dataclass
class SoakOutcome:
    """What happened."""

    faults: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    hits: int = 0
    checked_bytes: int = 0
    wrong: list[str] = field(default_factory=list)
    longest_s: dict[str, float] = field(default_factory=dict)
    far: Counter[str] = field(default_factory=Counter)
    """Of the last daemon: entries read from the far store and written to it, by outcome."""
    samples: dict[str, list[ProcessSample]] = field(default_factory=dict)
    """Of the steady client, and of the daemon that is alive at the end."""
    broken: list[str] = field(default_factory=list)
    """A line for each process that ended by itself, and for what was left when all clients had ended."""

    def add(self, report: ClientReport) -> None:
        """Count a client's report."""
        self.operations.update(report.operations)
        self.misses.update(report.misses)
        self.hits += report.hits
        self.checked_bytes += report.checked_bytes
        self.wrong += report.wrong
        for name, took_s in report.longest_s.items():
            self.longest_s[name] = max(took_s, self.longest_s.get(name, 0.0))


class SoakProcesses:
    """One run's processes. A context manager: the exit kills all of them."""

    def __init__(self, options: SoakOptions) -> None:
        self._options = options
        self._config = StoreConfig(
            socket=options.work / "run" / "s.sock", secret_file=options.work / "secret", autostart=False
        )
        self._lives: Counter[int] = Counter()
        self._clients: dict[int, subprocess.Popen[bytes]] = {}
        self._daemon: subprocess.Popen[bytes] | None = None
        self._far: RedisServer | None = None
        self._later: list[tuple[float, Callable[[], object]]] = []
        """What ends the faults that last: by its time in the run."""
        self._starting_s = 0.0
        """Time in which a daemon was started: it is no part of the run's."""
        self.outcome = SoakOutcome()

    def __enter__(self) -> SoakProcesses:
        if self._options.far_bytes:
            program = redis_program()
            if program is None:
                raise FileNotFoundError("no valkey-server and no redis-server: run script/setup, or --no-far")
            self._far = RedisServer(program, self._options.work, most_bytes=self._options.far_bytes).start()
        self._start_daemon()
        for index in range(self._options.clients):
            self._start_client(index)
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._clients.values(), *([self._daemon] if self._daemon else [])]:
            if process.poll() is None:
                process.kill()
            process.wait()
        if self._far is not None:
            self._far.stop()

    def run(self, faults: list[PlannedFault], look: Callable[[float, SoakOutcome], None]) -> None:
        """Run to the end; `look` is called about twice a second with the seconds that passed."""
        self._await_first_report()
        began_s, sampled_s, at = time.monotonic(), 0.0, 0
        self._starting_s = 0.0
        while (now_s := time.monotonic() - began_s - self._starting_s) < self._options.duration_s:
            while at < len(faults) and faults[at].at_s <= now_s:
                self._do(faults[at], now_s)
                at += 1
            self._end_faults(now_s)
            if now_s >= sampled_s + _SAMPLE_S:
                sampled_s = now_s
                self._sample(now_s)
                self._note_ended()
                look(now_s, self._with_reports())
            time.sleep(0.02)
        self._end_faults(float("inf"))
        self._end_clients()
        self._settle()
        self.outcome = self._with_reports()

    def _do(self, fault: PlannedFault, now_s: float) -> None:
        action, whose = fault.kind.split()
        if whose == "far":
            self._do_to_far(action, now_s + fault.for_s)
            return
        process = self._clients[fault.client] if whose == "client" else self._daemon
        if process is None or process.poll() is not None:
            return  # `_note_ended` tells of it
        self.outcome.faults[fault.kind] += 1
        if action == "stop":
            process.send_signal(signal.SIGSTOP)
            self._later.append((now_s + fault.for_s, partial(process.send_signal, signal.SIGCONT)))
            return
        process.kill()
        process.wait()
        if whose == "daemon":
            self._start_daemon()
        else:
            self._start_client(fault.client)

    def _do_to_far(self, action: str, end_s: float) -> None:
        if self._far is None or not self._far.is_alive():
            return
        self.outcome.faults[f"{action} far"] += 1
        if action == "stop":
            self._far.freeze()
            self._later.append((end_s, self._far.resume))
        else:
            self._far.kill()
            self._later.append((end_s, self._far.start))

    def _end_faults(self, now_s: float) -> None:
        due = [end for at_s, end in self._later if at_s <= now_s]
        self._later = [later for later in self._later if later[0] > now_s]
        for end in due:
            end()

    def _start_daemon(self) -> None:
        command = [sys.executable, "-m", "cornplug.store.daemon.main", "--quarantine-s", "0.5"]
        command += ["--socket", str(self._config.socket), "--secret-file", str(self._config.secret_file)]
        command += ["--size", str(self._options.size_bytes)]
        if self._options.disk_bytes:
            command += ["--disk", str(self._options.work / "disk")]
            command += ["--disk-size", str(self._options.disk_bytes)]
        if self._far is not None:
            command += ["--far", self._far.url]
        self._daemon = self._spawn(command, "daemon.log")
        self.outcome.samples["daemon"] = []
        began_s = time.monotonic()
        while not self._answers():
            if self._daemon.poll() is not None or time.monotonic() > began_s + _START_S:
                self.outcome.broken.append(f"a daemon did not start: {self._tail('daemon.log')}")
                break
        self._starting_s += time.monotonic() - began_s

    def _start_client(self, index: int) -> None:
        life = self._lives[index]
        self._lives[index] += 1
        arguments = [self._config.socket, self._config.secret_file, self._report(index, life)]
        command = [sys.executable, "-m", "devkit.store_soak.soak_client", *map(str, arguments)]
        command += [str(self._options.seed), str(index), str(life)]
        self._clients[index] = self._spawn(command, f"client-{index}.log")

    def _spawn(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        with (self._options.work / log).open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output)

    def _answers(self) -> bool:
        """Whether a daemon talks: it listens before it does."""
        probe = PoolStore(self._config, connect_timeout_s=1)
        try:
            return probe.is_connected
        finally:
            probe.close()

    def _await_first_report(self) -> None:
        """Interpreters that start on a loaded machine take long: the run's time begins after that."""
        end_s = time.monotonic() + _START_S
        while not self._has_reported(STEADY_CLIENT) and time.monotonic() < end_s:
            time.sleep(0.05)

    def _sample(self, now_s: float) -> None:
        for name, process in (("client", self._clients[STEADY_CLIENT]), ("daemon", self._daemon)):
            if process is not None and (sample := sample_process(process.pid, now_s)) is not None:
                self.outcome.samples.setdefault(name, []).append(sample)

    def _note_ended(self) -> None:
        """Processes that ended by themselves: named once, then started again."""
        if self._daemon is not None and self._daemon.poll() is not None:
            self.outcome.broken.append(f"the daemon ended by itself: {self._tail('daemon.log')}")
            self._start_daemon()
        for index, process in list(self._clients.items()):
            if process.poll() is not None:
                self.outcome.broken.append(
                    f"client {index} ended by itself: {self._tail(f'client-{index}.log')}"
                )
                self._start_client(index)

    def _end_clients(self) -> None:
        for process in self._clients.values():
            process.send_signal(signal.SIGTERM)
        for index, process in self._clients.items():
            try:
                status = process.wait(_CLIENT_END_S)
            except subprocess.TimeoutExpired:
                self.outcome.broken.append(f"client {index} did not end in {_CLIENT_END_S:.0f} s")
                continue
            # One that was started a moment ago ends before it can end in good order.
            if status and not (status == -signal.SIGTERM and not self._has_reported(index)):
                self.outcome.broken.append(
                    f"client {index} ended with {status}: {self._tail(f'client-{index}.log')}"
                )

    def _settle(self) -> None:
        """With its clients gone, a store has neither leases nor reservations."""
        store = PoolStore(self._config, connect_timeout_s=5)
        end_s, left = time.monotonic() + _SETTLE_S, "no answer"
        try:
            while time.monotonic() < end_s:
                try:
                    stat = store.stat(deadline_s=2)
                except StoreUnavailable as e:
                    left = f"no answer ({e.reason})"
                else:
                    left = f"{stat.leases} leases and {stat.reservations} reservations"
                    for far in stat.far.values():
                        self.outcome.far = Counter({f"read: {k}": n for k, n in far.reads.items()})
                        self.outcome.far.update({f"write: {k}": n for k, n in far.writes.items()})
                    if not stat.leases and not stat.reservations:
                        return
                time.sleep(0.1)
        finally:
            store.close()
        self.outcome.broken.append(f"after the last client's end: {left}")

    def _with_reports(self) -> SoakOutcome:
        known = self.outcome
        outcome = SoakOutcome(faults=known.faults, far=known.far, samples=known.samples, broken=known.broken)
        for path in self._options.work.glob("report-*.json"):
            outcome.add(msgspec.json.decode(path.read_bytes(), type=ClientReport))
        return outcome

    def _has_reported(self, index: int) -> bool:
        return self._report(index, self._lives[index] - 1).exists()

    def _report(self, index: int, life: int) -> Path:
        return self._options.work / f"report-{index}-{life}.json"

    def _tail(self, log: str) -> str:
        return (self._options.work / log).read_text(errors="replace")[-600:].strip() or "(its log is empty)"
