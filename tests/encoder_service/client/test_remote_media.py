"""Media of engines without a tower: only the service decodes, and signs what it made the rows of."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from cornplug.config import Config
from cornplug.encoder_service.client.remote_client import RemoteEncoder
from cornplug.encoder_service.formats.engine_seal import EmbeddingHandle
from cornplug.encoder_service.formats.image import digest_image, to_engine_rgb
from cornplug.encoder_service.formats.messages import MediaRequest
from cornplug.encoder_service.http.app import create_app
from cornplug.encoder_service.http.url_fetcher import UrlFetcher
from cornplug.errors import EncoderRefused
from cornplug.identity import embedding_key
from cornplug.store.memory import MemoryStore

from ..conftest import SECRET, MakeEncoder, Requests, png, sample_image
from ..execution.test_encoder import passes
from ..hostile_images import clear_rgb
from ..services import Served


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def medium(identity: bytes, data: bytes = b"", **changes: Any) -> MediaRequest:
    fields = {"modality": "image", "url": "", "cache_salt": None, "app": "chat", "deadline_s": 30.0}
    return MediaRequest(identity=identity, data=data, **{**fields, **changes})


def test_submit_medium_of_a_file_brings_the_rows_of_the_engines_tower_under_its_salt(
    stack: ExitStack,
    config: Config,
    make_encoder: MakeEncoder,
    request_for: Requests,
    llava_pair: tuple[Path, Path],
    qwen: Path,
) -> None:
    encoder = make_encoder(MemoryStore(capacity_bytes=16 << 20).connect())
    # No caller but a holder of the secret names a salt here.
    closed = config.encoder.model_copy(update={"trust_salts": False, "require_key": True})
    url = stack.enter_context(Served(create_app(encoder, closed, secret=SECRET))).url
    client = stack.enter_context(RemoteEncoder([url], SECRET))
    for path in (*llava_pair, qwen):
        loaded = encoder.registry.find_by_name(str(path))
        assert loaded is not None
        identity = loaded.served.identity
        want = encoder.submit(request_for(path, 1), inline=True).result(60)
        got = client.submit_media(medium(identity, png(sample_image(1)), cache_salt="acme")).result(60)
        claims = EmbeddingHandle.verify(got.handle, SECRET, now=time.time())
        assert claims.identity == identity
        assert claims.key == embedding_key(SECRET, identity, claims.media, "acme")
        assert (got.tensor.shape, got.tensor.dtype) == (want.tensor.shape, want.tensor.dtype)  # type: ignore[union-attr]
        rows, wanted = (
            torch.frombuffer(bytearray(tensor.data), dtype=torch.float32)
            for tensor in (got.tensor, want.tensor)  # type: ignore[union-attr]
        )
        torch.testing.assert_close(rows, wanted, atol=1e-5, rtol=1e-5)
        assert bool(claims.grid) == (path == qwen)
    before = passes(encoder)
    client.submit_media(medium(identity, png(sample_image(1)), cache_salt="acme")).result(60)
    assert passes(encoder) == before


def test_submit_medium_is_decoded_as_its_engine_does(
    stack: ExitStack, config: Config, make_encoder: MakeEncoder, qwen: Path
) -> None:
    encoder = make_encoder()
    url = stack.enter_context(Served(create_app(encoder, config.encoder, secret=SECRET))).url
    client = stack.enter_context(RemoteEncoder([url], SECRET))
    loaded = encoder.registry.find_by_name(str(qwen))
    assert loaded is not None
    data = clear_rgb()
    opened = Image.open(io.BytesIO(data))
    for rule in ("vllm-0.32", "vllm-0.33"):
        got = client.submit_media(medium(loaded.served.identity, data, decoding=rule)).result(60)
        claims = EmbeddingHandle.verify(got.handle, SECRET, now=time.time())
        assert got.decoding == rule
        assert claims.media == digest_image(to_engine_rgb(opened, rule))


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"data": b"no image"}, "unknown_format"),
        ({"url": "http://127.0.0.1:1/a.png"}, "remote_url"),
        ({"identity": b"?" * 32, "data": b"x"}, "unknown_model"),
        ({"data": b"x", "decoding": "vllm-9"}, "unknown_model"),
    ],
)
def test_submit_medium_that_is_refused_fails_with_the_services_reason(
    changes: dict[str, Any],
    want: str,
    stack: ExitStack,
    config: Config,
    make_encoder: MakeEncoder,
    qwen: Path,
) -> None:
    encoder = make_encoder()
    url = stack.enter_context(Served(create_app(encoder, config.encoder, secret=SECRET))).url
    client = stack.enter_context(RemoteEncoder([url], SECRET))
    loaded = encoder.registry.find_by_name(str(qwen))
    assert loaded is not None
    with pytest.raises(EncoderRefused) as e:
        client.submit_media(medium(**{"identity": loaded.served.identity, **changes})).result(60)
    assert e.value.reason == want
    # A client's medium is not the service's failure, and does not name it; another tower is, and does.
    assert (url in str(e.value)) == (want == "unknown_model")
    assert client.refusal is None


@pytest.mark.parametrize("reason", ["remote_failed", "remote_timeout", "fetches_full"])
def test_submit_medium_whose_url_one_service_cannot_fetch_goes_to_the_next(
    reason: str,
    stack: ExitStack,
    config: Config,
    make_encoder: MakeEncoder,
    qwen: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: the engine answered 400, and a second service was not asked."""
    encoders = [make_encoder(), make_encoder()]
    asked: list[str] = []

    async def fetch(self: UrlFetcher, field: str, url: str, **_: Any) -> bytes:
        asked.append(url)
        if len(asked) % 2:
            raise EncoderRefused(f"{field}: not from here", reason=reason, retry_after_s=3.0)
        return png(sample_image(1))

    monkeypatch.setattr(UrlFetcher, "fetch", fetch)
    urls = [
        stack.enter_context(Served(create_app(encoder, config.encoder, secret=SECRET))).url
        for encoder in encoders
    ]
    client = stack.enter_context(RemoteEncoder(urls, SECRET))
    alone = stack.enter_context(RemoteEncoder(urls[:1], SECRET))
    loaded = encoders[0].registry.find_by_name(str(qwen))
    assert loaded is not None
    wanted = medium(loaded.served.identity, url="http://images.test/a.png")
    assert client.submit_media(wanted).result(60).tensor.shape[0] > 0
    assert len(asked) == 2
    # Neither service is left out for it: media that come as bytes go on.
    assert client.refusal is None
    with pytest.raises(EncoderRefused) as e:
        alone.submit_media(wanted).result(60)
    assert e.value.reason == reason
    assert alone.refusal is None
