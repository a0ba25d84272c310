"""An image's embedding in a request to a real vLLM, in the image's place: same answer, no tower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cornplug.config import load
from cornplug.encoder_service.client.sync_client import EmbeddingRef, EncoderClient
from cornplug.store.client import PoolStore
from devkit import checkpoints
from devkit.engines import Answer, EncoderProcess, RequestFailed, StoreProcess, VllmServer, photos
from devkit.processes import together

MAKERS = {"llava": checkpoints.llava, "qwen2_vl": checkpoints.qwen2_vl}


@dataclass
class Rig:
    """An engine, a service and a store."""

    model: Path
    server: VllmServer
    encoder: EncoderProcess
    store_socket: Path

    def encode(self, photo: int, salt: str | None = None) -> EmbeddingRef:
        with EncoderClient(self.encoder.url) as client:
            return client.encode(photos()[photo].data, model=str(self.model), cache_salt=salt)

    def ask(self, part: Mapping[str, Any], **fields: Any) -> Answer:
        content = [part, {"type": "text", "text": "what is this"}]
        return self.server.chat([{"role": "user", "content": content}], max_tokens=8, **fields)


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Rig]]:
    """An engine for each model, on one service and one store."""
    folder = tmp_path_factory.mktemp("v")
    models = {name: make(folder / name) for name, make in MAKERS.items()}
    store_socket, socket = folder / "s.sock", folder / "e.sock"
    flags = ("--cornplug-store", str(store_socket), "--cornplug-encoder", str(socket))
    encoder = EncoderProcess(list(models.values()), "--store-socket", str(store_socket), socket=socket)
    servers = {
        name: VllmServer(model, "--kv-connector", "cornplug", *flags, log=folder / f"{name}.log")
        for name, model in models.items()
    }
    with StoreProcess(store_socket), together(encoder, *servers.values()):
        yield {name: Rig(models[name], servers[name], encoder, store_socket) for name in models}


@pytest.fixture(scope="module", params=sorted(MAKERS))
def rig(request: pytest.FixtureRequest, rigs: Mapping[str, Rig]) -> Rig:
    return rigs[request.param]


@pytest.mark.support("Sharing", "an embedding handle in the place of an image")
def test_request_embedding_handle_answers_as_its_image(rig: Rig) -> None:
    passes = rig.encoder.tower_passes()
    by_handle = rig.ask(rig.encode(0).to_vllm_content_part())
    with_pixels = rig.server.chat("what is this", images=[photos()[0].data], max_tokens=8)
    assert by_handle.token_ids == with_pixels.token_ids
    assert by_handle.prompt_tokens == with_pixels.prompt_tokens
    assert by_handle.logprobs == pytest.approx(with_pixels.logprobs, abs=1e-4)
    assert rig.encoder.tower_passes() == passes + 1
    other = rig.ask(rig.encode(1).to_vllm_content_part())
    assert other.token_ids != by_handle.token_ids
    # Two in one request, each with its own grid.
    parts = [rig.encode(i).to_vllm_content_part() for i in (2, 3)]
    content = [*parts, {"type": "text", "text": "compare"}]
    both = rig.server.chat([{"role": "user", "content": content}], max_tokens=8)
    pixels = rig.server.chat("compare", images=[photos()[i].data for i in (2, 3)], max_tokens=8)
    assert both.token_ids == pixels.token_ids


def test_request_embedding_handle_of_another_salt_is_refused(rig: Rig) -> None:
    part = rig.encode(0, salt="a").to_vllm_content_part()
    assert len(rig.ask(part, cache_salt="a").token_ids) == 8
    refused(rig, part, "salt", cache_salt="b")


def refused(rig: Rig, part: Mapping[str, Any], message: str, **fields: Any) -> None:
    with pytest.raises(RequestFailed) as e:
        rig.ask(part, **fields)
    assert e.value.status == 400, str(e.value)
    assert message in str(e.value)


def test_request_embedding_handle_not_accepted_is_400(rig: Rig) -> None:
    ref = rig.encode(4)
    good = ref.to_vllm_content_part()
    refused(rig, ref.to_vllm_content_part(by_value=True), "only by handle")
    text = ref.handle
    assert text is not None
    forged = {"type": "image_embeds", "image_embeds": text[:-8] + "AAAAAAAA"}
    refused(rig, forged, "not signed")
    if isinstance(good["image_embeds"], dict):
        grid = good["image_embeds"]["image_grid_thw"]
        refused(rig, {"type": "image_embeds", "image_embeds": {"image_grid_thw": grid}}, "missing")
        turned = {**good["image_embeds"], "image_grid_thw": [1, grid[2], grid[1]]}
        if grid[1] != grid[2]:
            refused(rig, {"type": "image_embeds", "image_embeds": turned}, "only by handle")
    store = PoolStore(load({"store.socket": rig.store_socket}).store, autostart=False, connect_timeout_s=5)
    store.delete([ref.key], deadline_s=5)
    store.close()
    refused(rig, good, "no longer")
    assert len(rig.ask(rig.encode(4).to_vllm_content_part()).token_ids) == 8
