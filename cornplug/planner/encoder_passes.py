"""Measurement of an encoder service's latency, for the profile table of a tower.

The latency of images is measured by a client. The time of each tower pass is read from the service's metrics.
"""

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
    """Number and total seconds of tower passes that an encoder service has run since it started."""

    count: float
    seconds: float

    def since(self, before: PassCounter) -> PassCounter:
        """Return the number and seconds of the passes since the earlier counter `before`."""
        return PassCounter(self.count - before.count, self.seconds - before.seconds)


@dataclass(frozen=True, slots=True)
class BenchRound:
    """Measurement of a batch of images that were sent at the same time."""

    images: int
    tokens: int
    """Total rows of the images' embeddings."""
    seconds: float
    """Seconds from sending the images until the last response."""
    passes: PassCounter
    """Tower passes that the service ran for these images."""


def measure_rows(
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
    """Measure the latency of encoding images, and return it as rows of a profile table. The images are random
    noise, so no cache has their embeddings.

    `edges` are the side lengths of the square images in pixels (towers with a fixed input size resize them).
    `batches` are the numbers of images to send together, and `cell` contains the other fields of
    `ProfileRow`. Raises EncoderError if the service rejects an image or does not reply, and CornplugError if
    the address does not belong to an encoder service.
    """
    rounds: list[BenchRound] = []
    with EncoderClient(url, deadline_s=_DEADLINE_S) as client:
        name = _served_name(client, model)
        steps = [(edge, batch) for edge in edges for batch in batches]
        for i, (edge, batch) in enumerate(steps):
            progress(f"{batch} images of {edge} pixels at a time", i / len(steps))
            _measure_batch(client, url, name, edge, batch)  # Warm-up round, which is not counted.
            rounds += [_measure_batch(client, url, name, edge, batch) for _ in range(repeats)]
    progress("done", 1.0)
    return latency_rows(rounds, patches_per_token, **cell)


def latency_rows(
    rounds: Sequence[BenchRound], patches_per_token: int, **cell: str | int | None
) -> list[ProfileRow]:
    """Return rows of a profile table with a client's latency for each number of patches in a batch.

    The latency is the time of the tower pass, as the service reports it, plus a single image's overhead for
    reading, resizing and transfer in both directions. The service may encode images that were sent together
    in different passes, so the mean of these passes is used, which is exact if a pass takes a + b * patches.
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


def read_pass_counter(url: str) -> PassCounter:
    """Return the counters of tower passes from /metrics of the service. Raises CornplugError if the address
    does not belong to an encoder service."""
    try:
        response = httpx.get(f"{url}/metrics", timeout=10, trust_env=False, verify=tls_context())
        text = response.raise_for_status().text
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


def _measure_batch(client: EncoderClient, url: str, model: str, edge: int, batch: int) -> BenchRound:
    # Create the images before the measurement, because a client's images also exist before it sends them.
    files = [_create_noise_image(edge) for _ in range(batch)]
    before, began = read_pass_counter(url), time.perf_counter()
    tokens = 0
    for _, result in client.encode_many(files, model=model, concurrency=batch):
        if not isinstance(result, EmbeddingRef):
            raise result
        tokens += result.shape[0]
    seconds = time.perf_counter() - began
    return BenchRound(batch, tokens, seconds, read_pass_counter(url).since(before))


def _create_noise_image(edge: int) -> bytes:
    """Return a square PNG of random pixels."""
    out = io.BytesIO()
    Image.frombytes("RGB", (edge, edge), os.urandom(3 * edge * edge)).save(out, "PNG", compress_level=1)
    return out.getvalue()


def _served_name(client: EncoderClient, model: str) -> str:
    """Return the model's name if the service serves the model. Otherwise raises ConfigError with the names of
    the served models."""
    names = [str(row["name"]) for row in client.models()]
    if model in names:
        return model
    raise ConfigError("model", f"the service does not serve {model}", f"It serves: {', '.join(names)}")
