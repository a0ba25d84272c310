"""Many faults by chance, on engines that share one store and one encoder service: the next vLLM's runner V1,
vLLM's runner V2 with a GPU's layout, and SGLang.

Every request is answered as stock answers it, and whenever the engines idle nothing is held. A run of
DEVKIT_CHAOS_FAULTS faults is drawn from DEVKIT_CHAOS_SEED, which the run prints.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import msgspec
import pytest
from integration.conftest import A_ARGS
from integration.faults import Subject, check, flip_everything
from integration.request_streams import Seen, stream
from integration.stack import ASKS, PREAMBLE, Stack, has_forgotten, services
from integration.test_adapted_engines import adapter

from cornplug.config import load
from devkit.engines import Answer, EngineServer, VllmServer, wait_until
from devkit.processes import at_once, together
from devkit.sglang_engine import SglangServer, sglang_python
from devkit.store_soak.soak_client import ClientReport
from devkit.vllm_beds import next_vllm

pytestmark = [
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup"),
    pytest.mark.timeout(7200),
]

FAULTS: Final = int(os.environ.get("DEVKIT_CHAOS_FAULTS", "500"))
SEED: Final = os.environ.get("DEVKIT_CHAOS_SEED") or str(random.SystemRandom().randrange(10**6))
ROUND: Final = 100
"""Faults from one look at what is held to the next."""
LORA: Final = ("--enable-lora", "--max-loras", "1", "--max-lora-rank", "8")
LONG: Final[Sequence[str]] = tuple(f"Story {i}. {PREAMBLE[:350]} Tell it." for i in range(8))
LONG_TOKENS: Final = 64
SMALL_MEMORY: Final = ("--num-gpu-blocks-override", "72")
"""Room for about five of `LONG`, and not for their answers."""
REQUEST_S: Final = 300.0
"""More than any request takes: V2's kernels are interpreted."""
ADAPTED: Final = f"Under the adapter. {PREAMBLE} What is a page?"
HELD_S: Final = 90.0
"""Time in which what engines hold in the store ends, once they idle."""


@dataclass
class Chaos:
    """The engines, stock's answers, and what came of the faults."""

    stack: Stack
    chance: random.Random
    subjects: Mapping[str, Subject]
    long: Mapping[tuple[str, int], Answer]
    """Stock's answers to `LONG`, by `Subject.stock`."""
    adapter: Path
    adapted: Answer
    """Stock's answer to `ADAPTED` under the adapter."""
    wrong: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

    def fault(self) -> None:
        """One fault, drawn by its weight."""
        (name,) = self.chance.choices(list(KINDS), [weight for weight, _ in KINDS.values()])
        KINDS[name][1](self)
        self.done[name] += 1

    def pause(self, longest_s: float) -> None:
        time.sleep(self.chance.uniform(0, longest_s))

    def server(self) -> EngineServer:
        return self.chance.choice(list(self.subjects.values())).server

    # -- the store -------------------------------------------------------------------------------

    def store_killed(self) -> None:
        assert self.stack.store is not None
        self.stack.store.kill()
        self.pause(2)
        self.stack.start_store()

    def store_full(self) -> None:
        assert self.stack.store is not None
        self.stack.store.kill()
        self.stack.start_store("192KiB")
        self.pause(3)
        self.store_killed()

    def store_stopped(self) -> None:
        assert self.stack.store is not None
        self.stack.store.freeze()
        self.pause(3)
        self.stack.store.resume()

    def store_slow(self) -> None:
        """It runs a third of the time."""
        assert self.stack.store is not None
        for _ in range(15):
            self.stack.store.freeze()
            time.sleep(0.1)
            self.stack.store.resume()
            time.sleep(0.05)

    def bytes_damaged(self) -> None:
        assert self.stack.store is not None
        flip_everything(self.stack.store.pid)

    def neighbour_killed(self) -> None:
        """A process that writes, leases and deletes entries of its own."""
        store, index = (
            load({"store.socket": self.stack.store_socket}).store,
            self.done["a neighbour is killed"],
        )
        report = self.stack.folder / f"neighbour-{index}.json"
        command = [sys.executable, "-m", "devkit.store_soak.soak_client", store.socket, store.secret_file]
        with (self.stack.folder / "neighbour.log").open("ab") as log:
            process = subprocess.Popen([*map(str, command), str(report), SEED, str(index), "0"], stderr=log)
        try:
            with contextlib.suppress(TimeoutError):
                wait_until(report.exists, deadline_s=20, what="a neighbour's report")
            self.pause(1)
            assert process.poll() is None, (self.stack.folder / "neighbour.log").read_text()[-2000:]
        finally:
            process.kill()
            process.wait()
        if report.exists():
            with contextlib.suppress(msgspec.DecodeError):  # killed while it wrote the report
                self.wrong += msgspec.json.decode(report.read_bytes(), type=ClientReport).wrong

    # -- the encoder service ----------------------------------------------------------------------

    def encoder_killed(self) -> None:
        self.stack.encoder.kill()
        self.stack.encoder.start()

    def encoder_stopped(self) -> None:
        self.stack.encoder.freeze()
        self.pause(3)
        self.stack.encoder.resume()

    # -- the engines ------------------------------------------------------------------------------

    def cache_reset(self) -> None:
        has_forgotten(self.server())  # vLLM refuses while a request runs: often enough

    def requests_aborted(self) -> None:
        """Clients hang up."""
        server = self.server()

        def hang_up() -> None:
            with contextlib.suppress(httpx.TimeoutException):
                ASKS[self.chance.randrange(len(ASKS))].put(
                    server, salt=str(self.chance.random()), timeout_s=self.chance.uniform(0.05, 1.5)
                )

        at_once(*[hang_up] * 3)

    def requests_preempted(self) -> None:
        """More requests at once than the engine has memory for."""
        subject = self.chance.choice(list(self.subjects.values()))
        answers = at_once(
            *(
                lambda words=words: subject.server.chat(  # type: ignore[misc]
                    words, max_tokens=LONG_TOKENS, ignore_eos=True, timeout_s=REQUEST_S
                )
                for words in LONG
            )
        )
        for i, answer in enumerate(answers):
            if why := departs(answer, self.long[subject.stock, i]):
                self.wrong.append(f"{subject.server.log.stem}, long answer {i}: {why}")

    def adapter_changed(self) -> None:
        """An adapter is loaded, used and unloaded."""
        server = self.subjects["a"].server
        post(server, "v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(self.adapter)})
        answer = server.chat(ADAPTED, max_tokens=8, model="x", timeout_s=REQUEST_S)
        if answer.token_ids != self.adapted.token_ids:
            self.wrong.append(f"under the adapter: {answer.token_ids}, stock {self.adapted.token_ids}")
        post(server, "v1/unload_lora_adapter", {"lora_name": "x"})


KINDS: Final[Mapping[str, tuple[int, Callable[[Chaos], None]]]] = {
    "the store is killed": (8, Chaos.store_killed),
    "the store is full": (4, Chaos.store_full),
    "the store is stopped": (10, Chaos.store_stopped),
    "the store is slow": (8, Chaos.store_slow),
    "stored bytes are damaged": (15, Chaos.bytes_damaged),
    "a neighbour is killed": (8, Chaos.neighbour_killed),
    "the encoder service is killed": (4, Chaos.encoder_killed),
    "the encoder service is stopped": (8, Chaos.encoder_stopped),
    "an engine's caches are reset": (12, Chaos.cache_reset),
    "requests are aborted": (12, Chaos.requests_aborted),
    "requests are preempted": (5, Chaos.requests_preempted),
    "an adapter is loaded and unloaded": (6, Chaos.adapter_changed),
}
"""Fault -> (weight, what does it)."""


@pytest.fixture(scope="module")
def chaos(
    models: Mapping[str, Path],
    stock: dict[tuple[str, int], Answer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Chaos]:
    folder = tmp_path_factory.mktemp("chaos")
    lora = adapter(folder / "x", layers="base_model.model.model.language_model.layers")
    answers, long = dict(stock), {}
    a, s = (
        VllmServer(models["a"], *A_ARGS, *LORA, "--lora-modules", f"x={lora}", log=folder / "stock-a.log"),
        SglangServer(models["q"], log=folder / "stock-s.log"),
    )
    with together(a, s):
        adapted = a.chat(ADAPTED, max_tokens=8, model="x")
        assert adapted.token_ids != a.chat(ADAPTED, max_tokens=8).token_ids
        answers.update({("sglang:q", i): ask.put(s) for i, ask in enumerate(ASKS)})
        for name, server in (("a", a), ("sglang:q", s)):
            for i, words in enumerate(LONG):
                long[name, i] = server.chat(words, max_tokens=LONG_TOKENS, ignore_eos=True, top_logprobs=2)
    with services(folder, models, answers) as stack:
        small = (*A_ARGS, *SMALL_MEMORY)
        engines: dict[str, EngineServer] = {
            # With adapters, requests of this release without one share, too.
            "a": stack.vllm(
                *("a", "a", *small, *LORA),
                hurried=True,
                env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true"},
                command=next_vllm(),
            ),
            "v": stack.vllm("v", "a", *small, hurried=True, bed="v2-gpu"),
            "s": stack.sglang("s", "q", "--chunked-prefill-size", "256", hurried=True),
        }
        at_once(stack.encoder.start, lambda: stack.start(**engines))
        subjects = {
            name: Subject(server, "", "sglang:q" if name == "s" else "a", "", noise_s=None)
            for name, server in engines.items()
        }
        yield Chaos(stack, random.Random(SEED), subjects, long, lora, adapted)


def test_engines_under_many_faults_answer_as_stock_and_hold_nothing(
    chaos: Chaos, record_property: Callable[[str, object], None]
) -> None:
    print(f"DEVKIT_CHAOS_SEED={SEED}")
    answers: Counter[str] = Counter()
    began_s = time.monotonic()
    for _ in range(0, FAULTS, ROUND):
        with contextlib.ExitStack() as ends:
            streams: dict[str, Seen] = {
                name: ends.enter_context(
                    stream(subject.server, f"{name}-{sum(chaos.done.values())}", REQUEST_S)
                )
                for name, subject in chaos.subjects.items()
            }
            for _ in range(min(ROUND, FAULTS)):
                chaos.fault()
                for seen in streams.values():
                    assert not seen.errors, f"seed {SEED}, after {chaos.done}: {seen.errors[0]!r}"
                chaos.pause(2)
        for name, seen in streams.items():
            check(chaos.stack, seen, chaos.subjects[name])
            answers[name] += len(seen.answers)
        assert not chaos.wrong, f"seed {SEED}: {chaos.wrong[:5]}"
        nothing_is_held(chaos)
    hits = {name: subject.server.metric("cornplug_hits_total") for name, subject in chaos.subjects.items()}
    preempted = {
        name: chaos.subjects[name].server.metric("vllm:num_preemptions_total") for name in ("a", "v")
    }
    lines = [f"{number:5d} {name}" for name, number in sorted(chaos.done.items())]
    lines += [
        f"{time.monotonic() - began_s:.0f} s, seed {SEED}; answers as stock: {dict(answers)}; "
        f"shared: {hits}; preemptions: {preempted}"
    ]
    record_property("table", "\n".join(lines))
    assert all(hits.values()), hits
    if FAULTS >= ROUND:
        assert set(chaos.done) == set(KINDS)
        assert all(preempted.values()), preempted


def nothing_is_held(chaos: Chaos) -> None:
    """Neither in the store nor in the engines, which idle."""
    held = chaos.stack.stat

    def ended() -> bool:
        stat = held()
        return not stat.reservations and not stat.leases

    try:
        wait_until(ended, deadline_s=HELD_S, what="the end of leases and reservations")
    except TimeoutError as e:
        raise AssertionError(f"seed {SEED}, after {chaos.done}: held are {held()}") from e
    for name in ("a", "v"):
        server = chaos.subjects[name].server
        wait_until(
            lambda server=server: server.metric("vllm:kv_cache_usage_perc") == 0,  # type: ignore[misc]
            deadline_s=HELD_S,
            what=f"the end of blocks in use in {name}",
        )


def departs(answer: Answer, stock: Answer) -> str:
    """Where an answer leaves stock's; "" if it does not, or only where stock's two best tokens are as good.

    A batch of another size changes the last digits of log-probabilities.
    """
    for i, (token, expected) in enumerate(zip(answer.token_ids, stock.token_ids, strict=True)):
        if token != expected:
            best, second = stock.top_logprobs[i][:2]
            return "" if best - second < 1e-3 else f"token {i} is {token}, stock's {expected}"
    return ""


def post(server: EngineServer, path: str, body: Mapping[str, str]) -> None:
    answer = httpx.post(f"{server.url}/{path}", json=body, timeout=REQUEST_S, trust_env=False)
    assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:500]}"
