"""More public bug reports about vLLM and its peers, on real engines.

As in test_public_reports.py, a comment beside each test names the report, as repository#number.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from integration.faults import flip_some
from integration.stack import count, forget_prefixes, settle_saves
from integration.test_adapted_engines import adapter
from integration.test_public_reports import (
    LORA,
    PAGE,
    WORDS,
    Completion,
    complete,
    ids,
    picture,
    same,
)

from cornplug.host import free_port
from cornplug.processes import ManagedProcess, responds_ok
from devkit import checkpoints
from devkit.engines import StoreProcess, VllmServer, data_url, vllm_command, wait_until
from devkit.injected_code import injected_environment
from devkit.processes import at_once, environment, together
from devkit.vllm_beds import next_vllm

pytestmark = pytest.mark.timeout(1800)

SAVES: Final = ("--cornplug-save", "always")
OWN: Final = {"VLLM_SERVER_DEV_MODE": "1", "CORNPLUG_STORE_AUTOSTART": "false"}


def shares(store: Path | None) -> Sequence[str]:
    """Flags of an engine that shares, by the store at this socket or by the default one."""
    return "--kv-connector", "cornplug", *SAVES, *(("--cornplug-store", str(store)) if store else ())


def departs(answer: Completion, stock: Completion, tie: float = 1e-3) -> bool:
    """Whether an answer leaves stock's at a token of which stock was sure.

    A batch of another size changes the last digits of log-probabilities, so two best tokens that are as good
    as each other may change places.
    """
    for token, expected, margin in zip(answer.token_ids, stock.token_ids, stock.margins, strict=True):
        if token != expected:
            return margin >= tie
    return False


def loaded(server: VllmServer) -> float:
    """Tokens that the engine had from the store so far."""
    return count(server, "saved_tokens_total")


# -- text ----------------------------------------------------------------------------------------

STALLING: Final = """import builtins
import io
import os
import time

FOLDER, STALL, SEEN = {folder!r}, {stall!r}, {seen!r}
stat, scandir, opened = os.stat, os.scandir, io.open


def stalls():
    try:
        stat(STALL)
    except OSError:
        return False
    return True


def stalling(original):
    def call(path=".", *args, **kwargs):
        # An open file has no path, and is not of the folder here.
        named = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if named.startswith(FOLDER) and stalls():
            opened(SEEN, "a").close()
            while stalls():
                time.sleep(0.05)
        return original(path, *args, **kwargs)

    return call


os.stat, os.scandir = stalling(stat), stalling(scandir)
io.open = builtins.open = stalling(opened)
"""
"""Makes Python's calls for the files of `folder` wait while the file `stall` exists, as on a network mount
whose server is down. The file `seen` exists once a call has waited."""


@dataclass
class Texts:
    """Two vLLM of one model with an adapter: stock, and one that shares, whose adapter's folder can stall."""

    folder: Path
    model: Path
    store: StoreProcess
    stock: VllmServer
    ours: VllmServer
    flags: Sequence[str]
    """Flags that the engines have in common."""
    stall: Path
    seen: Path


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, sockets: Path) -> Iterator[Texts]:
    folder = tmp_path_factory.mktemp("texts")
    model, store = checkpoints.qwen2_text(folder / "model"), StoreProcess(sockets / "texts")
    stall, seen = folder / "stall", folder / "seen"
    code = STALLING.format(folder=str(adapter(folder / "x")), stall=str(stall), seen=str(seen))
    flags = ("--block-size", "32", *LORA, "--lora-modules", f"x={folder / 'x'}")
    # With adapters, requests of this release without one share, too.
    stock = VllmServer(model, *flags, log=folder / "stock.log", env=OWN, vllm=next_vllm())
    ours = VllmServer(
        model,
        *flags,
        *shares(store.socket),
        log=folder / "ours.log",
        env={**OWN, **injected_environment(folder, code)},
        vllm=next_vllm(),
    )
    with store, together(stock, ours):
        yield Texts(folder, model, store, stock, ours, flags, stall, seen)


def test_stalled_folder_of_an_adapter_delays_no_request(texts: Texts) -> None:  # SkyRL#1606
    """The answers come while the folder stalls: its end waits for them."""
    plain, adapted, later = ids(11, 300), ids(12, 300), ids(13, 300)
    complete(texts.ours, ids(14, 300), model="x")  # the engine has read the adapter
    expected = [complete(texts.stock, plain), complete(texts.stock, adapted, model="x")]
    assert complete(texts.stock, plain, model="x").logprobs != pytest.approx(expected[0].logprobs, abs=1e-2)
    before = count(texts.ours, "misses_total", reason="identifying")
    texts.stall.touch()
    try:
        with ThreadPoolExecutor(2) as pool:
            under = pool.submit(complete, texts.ours, adapted, model="x")
            wait_until(texts.seen.exists, deadline_s=60, what="a look at the adapter's files")
            same(complete(texts.ours, plain), expected[0])
            same(under.result(), expected[1])
    finally:
        texts.stall.unlink()
    assert count(texts.ours, "misses_total", reason="identifying") > before

    # The adapter's KV is shared again.
    stock = complete(texts.stock, later, model="x")
    same(complete(texts.ours, later, model="x"), stock)
    settle_saves(texts.ours, texts.store)
    forget_prefixes(texts.ours)
    taken = loaded(texts.ours)
    same(complete(texts.ours, later, model="x"), stock)
    assert loaded(texts.ours) - taken >= 2 * PAGE


MODELSCOPE: Final[Mapping[str, str]] = {
    "__init__.py": "from transformers import AutoConfig\n\n__version__ = '1.40.2'\n",
    "hub/__init__.py": "",
    "hub/snapshot_download.py": "def snapshot_download(*args, **kwargs):\n    raise OSError('a download')\n",
    "utils/__init__.py": "",
    "utils/hf_util.py": "def patch_hub():\n    pass\n",
}
"""What vLLM imports of the package modelscope. For a model in a local folder it calls `patch_hub` and
`AutoConfig.from_pretrained` alone, and both act as transformers does there."""


def test_local_folder_is_shared_whatever_hub_is_named(texts: Texts) -> None:  # dynamo#5012
    """With the package modelscope itself where it is installed, else with a stand-in."""
    stand_in = texts.folder / "hub"
    for name, text in MODELSCOPE.items():
        file = stand_in / "modelscope" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    prompt = ids(21, 300)
    stock = complete(texts.stock, prompt)
    named = VllmServer(
        texts.model,
        *(*texts.flags, *shares(texts.store.socket)),
        log=texts.folder / "named.log",
        env={**OWN, "VLLM_USE_MODELSCOPE": "True"},
        packages=() if importlib.util.find_spec("modelscope") else (stand_in,),
        vllm=next_vllm(),
    )
    with named:
        same(complete(named, prompt), stock)
        settle_saves(named, texts.store)
    before = loaded(texts.ours)
    same(complete(texts.ours, prompt), stock)
    assert loaded(texts.ours) - before >= 2 * PAGE


USUAL: Final = Path(f"/tmp/cornplug-{os.getuid()}")
"""This user's folder of sockets where no variable names another one."""


@pytest.fixture
def run_folder(sockets: Path) -> Iterator[Path]:
    """The folder that engines under `behind` have in place of this user's folder of sockets in /tmp.

    A store that an engine started there ends with the test.
    """
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot make a mount namespace")
    folder = sockets / "run"
    folder.mkdir(mode=0o700)
    was_there = USUAL.exists()
    USUAL.mkdir(mode=0o700, exist_ok=True)
    yield folder
    for path in folder.glob("*.sock"):
        with contextlib.suppress(OSError):
            os.kill(listener(path), signal.SIGTERM)
    if not was_there:
        with contextlib.suppress(OSError):  # somebody uses it by now
            USUAL.rmdir()


def behind(run: Path, script: Path) -> Path:
    """Write a command `vllm` that has `run` in place of this user's folder of sockets in /tmp. Returns it."""
    inside = f'mount --bind {run} {USUAL} && exec {shlex.quote(vllm_command())} "$@"'
    script.write_text(f'#!/bin/sh\nexec unshare --mount sh -c {shlex.quote(inside)} vllm "$@"\n')
    script.chmod(0o755)
    return script


def listener(path: Path) -> int:
    """Id of the process that listens at a Unix socket. Raises OSError when there is none."""
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(path))
        pid: int = struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid


def test_engines_of_any_session_meet_at_one_store(texts: Texts, run_folder: Path, tmp_path: Path) -> None:
    """One has the XDG_RUNTIME_DIR of a host where that folder exists, as Slurm leaves it; one has none."""
    vllm = behind(run_folder, tmp_path / "vllm")
    first, fresh = (
        VllmServer(
            texts.model,
            *("--block-size", "32", *shares(None)),
            log=tmp_path / f"{name}.log",
            env={"VLLM_SERVER_DEV_MODE": "1", "CORNPLUG_RUNTIME_DIR": "", "XDG_RUNTIME_DIR": folder},
            vllm=vllm,
        )
        for name, folder in (("first", str(tmp_path / "absent")), ("fresh", ""))
    )
    prompt = ids(31, 300)
    stock = complete(texts.stock, prompt)
    with together(first, fresh):
        (path,) = run_folder.glob("*.sock")
        store = StoreProcess(path)  # never started: an engine has
        same(complete(first, prompt), stock)
        settle_saves(first, store)
        before = loaded(fresh)
        same(complete(fresh, prompt), stock)
        assert loaded(fresh) - before >= 2 * PAGE
        assert not (tmp_path / "absent").exists()


# -- preemptions and damage ----------------------------------------------------------------------

SLOW_COPIES: Final = """import contextlib
import time


def change(module):
    after = module.CpuSide.after

    @contextlib.contextmanager
    def late(self, mark):
        time.sleep(0.2)
        with after(self, mark):
            yield

    module.CpuSide.after = late
"""
"""Makes each copy of KV between an engine's blocks and the store begin 0.2 s late."""
COPIES: Final = "cornplug.vllm_connector.kv_copies.block_copies"


def test_pages_saved_beside_preemptions_are_right(
    texts: Texts,
    sockets: Path,
    tmp_path: Path,
) -> None:  # vllm#52360
    """Copies begin late, so blocks of preempted requests are given away while copies of them are due."""
    late = injected_environment(tmp_path, SLOW_COPIES, into=COPIES)
    store = StoreProcess(sockets / "preempted", log=tmp_path / "store.log")
    # All prompts fit when they are admitted, and not when their answers have grown.
    few = ("--block-size", "32", "--num-gpu-blocks-override", "76")
    ours = VllmServer(
        texts.model,
        *(*few, *shares(store.socket)),
        log=tmp_path / "ours.log",
        env={**OWN, **late},
        bed="v2-gpu",
    )
    ask = partial(complete, timeout_s=600, logprobs=2)
    with store, ours:
        for attempt, tokens in enumerate((160, 320, 640)):  # longer answers meet on a busy machine, too
            prompts = [ids(60 + 6 * attempt + i, 370) for i in range(6)]
            found = at_once(*(partial(ask, ours, prompt, max_tokens=tokens) for prompt in prompts))
            if ours.metric("vllm:num_preemptions_total"):
                break
        assert ours.metric("vllm:num_preemptions_total") > 0
        for prompt, answer in zip(prompts, found, strict=True):
            assert not departs(answer, ask(texts.stock, prompt, max_tokens=tokens))

        settle_saves(ours, store)
        forget_prefixes(ours)
        before = loaded(ours)
        for prompt, answer in zip(prompts, found, strict=True):
            longer = (*prompt, *answer.token_ids)
            same(ask(ours, longer), ask(texts.stock, longer))
        assert loaded(ours) - before >= len(prompts) * PAGE


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A model whose layers keep KV in several groups."""

    model: Callable[[Path], Path]
    flags: Sequence[str]
    few: int
    """Blocks for about 1.3 requests."""
    prompt: int
    tie: float = 1e-3
    """Difference of two log-probabilities that are equal but for rounding."""


HYBRIDS: Final[Mapping[str, Hybrid]] = {
    # As of GPT-OSS: groups of windows and one of full attention.
    "windows": Hybrid(
        partial(checkpoints.llama_windowed, windows=3, full=2),
        (
            *("--block-size", "32", "--max-num-seqs", "8"),
            *("--max-model-len", "768", "--max-num-batched-tokens", "256"),
        ),
        few=80,
        prompt=640,
    ),
    # vLLM makes blocks of 128 tokens, as large as a state.
    "states": Hybrid(
        checkpoints.qwen3_5_text,
        (
            *("--dtype", "bfloat16", "--block-size", "64", "--max-num-seqs", "8"),
            *("--max-model-len", "1024", "--max-num-batched-tokens", "256"),
        ),
        few=20,
        prompt=900,
        tie=0.05,
    ),
}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_damaged_pages_of_groups_under_pressure_are_computed(
    kind: str,
    sockets: Path,
    tmp_path: Path,
) -> None:  # vllm#50454
    """Eight clients at once, memory for one, and a twentieth of the store damaged in each round."""
    which = HYBRIDS[kind]
    model = which.model(tmp_path / "model")
    store = StoreProcess(sockets / kind, log=tmp_path / "store.log")
    stock = VllmServer(model, *which.flags, log=tmp_path / "stock.log", bed="v2")
    ours = VllmServer(
        model,
        *(*which.flags, "--num-gpu-blocks-override", str(which.few), *shares(store.socket)),
        log=tmp_path / "ours.log",
        env=OWN,
        bed="v2",
    )
    ask = partial(complete, timeout_s=600, logprobs=2)
    prompts = [ids(100 + i, which.prompt) for i in range(8)]
    with store, together(stock, ours):
        expected = [ask(stock, prompt) for prompt in prompts]
        for prompt, known in zip(prompts, expected, strict=True):
            assert not departs(ask(ours, prompt), known, which.tie)
        for seed in range(4):
            settle_saves(ours, store)
            flip_some(store.pid, 0.05, seed)
            forget_prefixes(ours)
            found = at_once(*(partial(ask, ours, prompt) for prompt in prompts))
            for answer, known in zip(found, expected, strict=True):
                assert not departs(answer, known, which.tie)
        assert ours.is_ready()
        assert loaded(ours) > 0
        assert count(ours, "misses_total", reason="corrupt") > 0
        wait_until(lambda: store.stat().leases == 0, deadline_s=90, what="no lease")


# -- images --------------------------------------------------------------------------------------


class Renderer(ManagedProcess):
    """`vllm launch render MODEL`, which prepares requests for engines on other hosts."""

    def __init__(self, model: Path, *args: str, log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [vllm_command(), "launch", "render", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--served-model-name", "model", "--dtype", "float32", "--max-model-len", "2048", *args]
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        super().__init__(command, log=log, env=environment(quiet), ready_timeout_s=600)

    def is_ready(self) -> bool:
        return responds_ok(f"{self.url}/health")

    def chat(self, images: Sequence[bytes]) -> dict[str, Any]:
        """The chat of `WORDS` with these images, as an engine takes it."""
        content = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": WORDS}]}]
        body = {"model": "model", "messages": messages, "max_tokens": 8, "temperature": 0}
        return dict(posted(f"{self.url}/v1/chat/completions/render", body))


def posted(url: str, body: Mapping[str, Any]) -> Any:
    answer = httpx.post(url, json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_requests_rendered_elsewhere_share_text_and_count_images(
    sockets: Path,
    tmp_path: Path,
) -> None:  # llm-d-kv-cache#423, llm-d-router#1289
    model = checkpoints.qwen2_vl(tmp_path / "model")
    store = StoreProcess(sockets / "rendered", log=tmp_path / "store.log")
    stock = VllmServer(model, log=tmp_path / "stock.log")
    renderers = (
        Renderer(model, log=tmp_path / "renderer.log"),
        Renderer(model, "--kv-connector", "cornplug", log=tmp_path / "renderer-ours.log"),
    )
    first, fresh = (
        VllmServer(
            model,
            *("--enable-scale-out", *shares(store.socket)),
            log=tmp_path / f"{name}.log",
            env=OWN,
        )
        for name in ("first", "fresh")
    )

    def tokens(server: VllmServer, request: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(posted(f"{server.url}/inference/v1/generate", request)["choices"][0]["token_ids"])

    with store:
        with together(stock, first, *renderers):
            expected = [stock.chat(WORDS, images=images, max_tokens=8) for images in ([], [picture()])]
            # Of the words alone, and of the words behind an image.
            requests = [[one.chat(images) for images in ([], [picture()])] for one in renderers]
            for rendered in requests:
                for request, known in zip(rendered, expected, strict=True):
                    assert tokens(first, request) == known.token_ids
            settle_saves(first, store)
        with fresh:
            for rendered in requests:
                for request, known in zip(rendered, expected, strict=True):
                    assert tokens(fresh, request) == known.token_ids
            assert loaded(fresh) >= 2 * PAGE
            assert count(fresh, "misses_total", kind="embedding", reason="foreign_name") > 0
            assert "media from another process" in fresh.log.read_text()
