"""SGLang that divides its work over pipeline stages, or prefill and decode servers:
each shares its pages with a fresh server of one rank, which answers alike, and takes that one's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
from integration.stack import forget_prefixes

from cornplug.host import free_port
from devkit import checkpoints
from devkit.engines import wait_until
from devkit.processes import StoreProcess, at_once, together
from devkit.sglang_engine import Generation, SglangServer, sglang_python
from devkit.vllm_beds import NIXL, bed_environment

pytestmark = [
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup"),
    pytest.mark.timeout(300),
]

THEIRS: Final = [(7 * i + 300) % 600 for i in range(700)]
OTHERS: Final = [(11 * i + 100) % 600 for i in range(700)]
SHAREABLE: Final = 640
"""Of each, in whole pages of 64; the last token is always computed."""
ANSWER: Final = 8
_TWO_CORES: Final = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture
def store(short_path: Path) -> Iterator[StoreProcess]:
    """A store, beside a model of three layers: two stages hold one and two."""
    checkpoints.qwen2_text(short_path / "model", layers=3)
    with StoreProcess(short_path / "s", log=short_path / "store.log") as store:
        yield store


def server(
    store: StoreProcess, name: str, *args: str, env: dict[str, str] | None = None, port: int | None = None
) -> SglangServer:
    folder = store.socket.parent
    return SglangServer(
        folder / "model", "--cornplug-app", name, "--cornplug-store", str(store.socket), *args,
        log=folder / f"{name}.log", env={"CORNPLUG_STORE_AUTOSTART": "false", **(env or {})}, port=port,
    )  # fmt: skip


def stored(store: StoreProcess, server: SglangServer, tokens: Sequence[int], entries: int) -> None:
    """Wait until the store has so many entries: a page is saved in idle moments, or at its second request."""

    def there() -> bool:
        if store.stat().entries >= entries:
            return True
        server.generate(tokens, max_tokens=1)
        return False

    wait_until(there, deadline_s=30, what=f"{entries} pages in the store")


def continues(server: SglangServer, tokens: Sequence[int], first: Generation) -> None:
    """A server that never saw these tokens has them from the store, and answers as the first one did."""
    again = server.generate(tokens, max_tokens=ANSWER)
    assert again.cached["storage"] >= 0.9 * SHAREABLE
    assert again.output_ids == first.output_ids


@pytest.mark.support("Sharing", "pipeline stages write pages together for any degree", engine="sglang")
def test_sglang_pages_of_pipeline_stages_are_read_by_one_rank_and_back(store: StoreProcess) -> None:
    stages = server(store, "stages", "--pp-size", "2", env=_TWO_CORES)
    one = server(store, "one")
    pages = SHAREABLE // 64
    with together(stages, one):
        wrote = stages.generate(THEIRS, max_tokens=ANSWER)
        assert wrote.cached["storage"] == 0
        stored(store, stages, THEIRS, pages)
        continues(one, THEIRS, wrote)
        forget_prefixes(stages)
        continues(stages, THEIRS, wrote)

        wrote = one.generate(OTHERS, max_tokens=ANSWER)
        stored(store, one, OTHERS, 2 * pages)
        continues(stages, OTHERS, wrote)
        # The store has nothing of this prompt, and no stage waits for another.
        assert stages.generate([9, *THEIRS], max_tokens=1).cached["storage"] == 0
        assert stages.metric("cornplug_saves_total", kind="kv_page", outcome="write_failed") == 0


class Pair:
    """A prefill and a decode server with KV transfer over NIXL, both started with cornplug."""

    def __init__(self, store: StoreProcess) -> None:
        self._port, self._rooms = free_port(), 0
        nixl = ("--disaggregation-transfer-backend", "nixl", "--page-size", "64")
        env = bed_environment("v1", NIXL)
        self.prefill = server(
            store, "prefill", *nixl, "--disaggregation-mode", "prefill",
            "--disaggregation-bootstrap-port", str(self._port), env=env,
        )  # fmt: skip
        self.decode = server(store, "decode", *nixl, "--disaggregation-mode", "decode", env=env)

    def generate(self, tokens: Sequence[int]) -> tuple[Generation, Generation]:
        """What both servers answer, each asked as SGLang's router asks them."""
        self._rooms += 1
        where = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._port,
            "bootstrap_room": self._rooms,
        }
        of_prefill, of_decode = at_once(
            *(
                lambda server=server: server.generate(tokens, max_tokens=ANSWER, **where)  # type: ignore[misc]
                for server in (self.prefill, self.decode)
            )
        )
        return of_prefill, of_decode


@pytest.mark.support("Beside other connectors", "PD pair over NIXL: prefill shares", engine="sglang")
def test_sglang_prefill_server_shares_pages_and_its_decode_server_runs_as_stock(store: StoreProcess) -> None:
    pair, one = Pair(store), server(store, "one")
    pages = SHAREABLE // 64
    with together(pair.prefill, pair.decode, one):
        of_prefill, of_decode = pair.generate(THEIRS)
        assert of_prefill.cached["storage"] == 0
        assert of_prefill.output_ids[:1] == of_decode.output_ids[:1]
        wait_until(
            lambda: store.stat().entries >= pages, deadline_s=30, what="pages of an idle prefill server"
        )
        continues(one, THEIRS, of_decode)
        forget_prefixes(pair.prefill)
        of_prefill, again = pair.generate(THEIRS)
        assert of_prefill.cached["storage"] >= 0.9 * SHAREABLE
        assert again.output_ids == of_decode.output_ids

        wrote = one.generate(OTHERS, max_tokens=ANSWER)
        stored(store, one, OTHERS, 2 * pages)
        of_prefill, of_decode = pair.generate(OTHERS)
        assert of_prefill.cached["storage"] >= 0.9 * SHAREABLE
        assert of_decode.output_ids == wrote.output_ids
        # SGLang counts for both halves of a pair; cornplug's counts are of this server alone.
        assert pair.decode.metric("cornplug_saves_total", kind="kv_page") == 0
        assert pair.decode.metric("cornplug_hits_total", kind="kv_page") == 0
    said = pair.decode.log.read_text()
    assert "KV is not shared, only embeddings: --disaggregation-mode decode" in said
