"""The times of an encoder service, measured as its clients see them."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import httpx
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from cornplug.encoder_service.client.embedding_ref import EmbeddingRef
from cornplug.encoder_service.client.sync_client import EncoderClient
from cornplug.errors import ConfigError, CornplugError
from cornplug.host import tls_context
from cornplug.planner.inputs.profile_tables import ProfileRow

_DEADLINE_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class PassCounter:
    """Tower passes of a service so far, by its own count."""

    count: float
    seconds: float

    def since(self, before: PassCounter) -> PassCounter:
        return PassCounter(self.count - before.count, self.seconds - before.seconds)


@dataclass(frozen=True, slots=True)
class BenchRound:
    """So many images, sent at once."""

    images: int
    tokens: int
    """Rows of all their embeddings."""
    seconds: float
    """From sending to the last answer, of one image sent alone."""
    passes: PassCounter


def rows(
    url: str,
    model: str,
    *,
    edges: Sequence[int],
    batches: Sequence[int],
    repeats: int,
    patches_per_token: int,
    progress: Callable[[str, float], None],
    **cell: str | int | None,
) -> list[ProfileRow]:
    """Encode images of fresh noise, which no cache has; `cell` are `ProfileRow`'s other fields.

    Args:
        edges: pixels of the square images' sides; towers of one size make all alike.
        batches: images at a time.

    Raises EncoderError, CornplugError.
    """
    rounds: list[BenchRound] = []
    with EncoderClient(url, deadline_s=_DEADLINE_S) as client:
        name = _served_name(client, model)
        steps = [(edge, batch) for edge in edges for batch in batches]
        for i, (edge, batch) in enumerate(steps):
            progress(f"{batch} images of {edge} pixels at a time", i / len(steps))
            _round(client, url, name, edge, batch)  # warms up
            rounds += [_round(client, url, name, edge, batch) for _ in range(repeats)]
    progress("done", 1.0)
    return points(rounds, patches_per_token, **cell)


def points(
    rounds: Sequence[BenchRound], patches_per_token: int, **cell: str | int | None
) -> list[ProfileRow]:
    """The table's rows: a client's wait for a batch of so many patches.

    That is the tower's time for such a pass, by the service's own count, and the overhead of an
    image sent alone beyond its pass: reading, resizing, the way there and back. Images sent at
    once need not go through the tower at once: the mean of their passes counts, which is exact
    where a pass takes a + b * patches.
    """
    single = [r for r in rounds if r.images == 1]
    if not single:
        raise ConfigError("batches", "batch size 1 is missing", "Start with 1, as in 1,2,4")
    overhead_s = max(median(r.seconds - r.passes.seconds for r in single), 0.0)
    passes: dict[int, list[float]] = {}
    for r in rounds:
        patches = round(r.tokens / r.passes.count) * patches_per_token
        passes.setdefault(patches, []).append(r.passes.seconds / r.passes.count)
    return [
        ProfileRow(kind="encode", x=patches, seconds=median(seconds) + overhead_s, **cell)  # type: ignore[arg-type]
        for patches, seconds in sorted(passes.items())
    ]


def passes(url: str) -> PassCounter:
    """The counters of the service's /metrics. Raises CornplugError where it is no encoder service."""
    try:
        answer = httpx.get(f"{url}/metrics", timeout=10, trust_env=False, verify=tls_context())
        text = answer.raise_for_status().text
    except httpx.HTTPError as e:
        raise CornplugError(
            f"{url}: {e}. Check that this is the address of an encoder service.", reason="server"
        ) from e
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }
    names = ("tower_seconds_count", "tower_seconds_sum")
    try:
        return PassCounter(*(values[f"cornplug_encoder_{name}"] for name in names))
    except KeyError as e:
        raise CornplugError(
            f"{url}/metrics has no {e.args[0]}, so it is not an encoder service", reason="server"
        ) from e


def _round(client: EncoderClient, url: str, model: str, edge: int, batch: int) -> BenchRound:
    # Packed beforehand: a client's files are ready, too.
    files = [_noise(edge) for _ in range(batch)]
    before, began = passes(url), time.perf_counter()
    tokens = 0
    for _, answer in client.encode_many(files, model=model, concurrency=batch):
        if not isinstance(answer, EmbeddingRef):
            raise answer
        tokens += answer.shape[0]
    seconds = time.perf_counter() - began
    return BenchRound(batch, tokens, seconds, passes(url).since(before))


def _noise(edge: int) -> bytes:
    """A PNG that was never seen before."""
    out = io.BytesIO()
    Image.frombytes("RGB", (edge, edge), os.urandom(3 * edge * edge)).save(out, "PNG", compress_level=1)
    return out.getvalue()


def _served_name(client: EncoderClient, model: str) -> str:
    """The service's name of the model. Raises ConfigError naming those it has."""
    names = [str(row["name"]) for row in client.models()]
    if model in names:
        return model
    raise ConfigError("model", f"the service does not serve {model}", f"It serves: {', '.join(names)}")
