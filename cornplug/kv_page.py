"""Engine-neutral KV page: the geometry of a page, and the part that each rank holds.

A page contains the KV of `page_tokens` tokens in every layer. The head is the outermost dimension:

    [kv_head][layer][K, V][token][dim]

With MLA there is one head and one plane of latent vectors. Every rank holds the latents, and the first rank
writes them.

A tensor-parallel rank has a contiguous range of heads, so it reads and writes contiguous bytes. A page can be
read with another TP or PP degree than it was written with. Each *segment* has its own checksum. A segment is
one head in all layers, or in a run of layers that no pipeline stage of the writer splits. A page has few
segments, because each segment costs a call per copy and 8 bytes of the header. Keys are cached after rotary
embedding, as in both engines.

A page of recurrent states has one row per layer, and a rank's part of the state instead of a head. It can
only be read with the same TP degree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from cornplug.codec import ITEM_BYTES
from cornplug.errors import LayoutError

PLANES = 2
"""Number of planes per layer: K and V. MLA caches one latent plane instead."""

QUANTISED_FORMATS = frozenset({"fp8_e4m3", "fp8_e5m2"})
"""Formats of values that pages store in one byte each."""

MAX_SEGMENTS = 0xFFFF
"""Maximum number of segments in a header."""


class PageSize(Protocol):
    """Size of a page, or total size of several kinds of pages for the same tokens."""

    @property
    def page_tokens(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class CombinedPageSize:
    """Total size of several kinds of pages for the same tokens."""

    page_tokens: int
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGeometry:
    """Shape of a model's pages. It does not depend on the engine's parallelism, except for recurrent
    states."""

    page_tokens: int
    heads: int
    """Number of KV heads of the model."""
    layers: int
    """Number of attention layers of the model."""
    dim: int
    dtype: str
    """torch's name without "torch.": float32, float16 or bfloat16, or uint8 for `quantised` values."""
    planes: int = PLANES
    """2 for keys and values, 1 for MLA's latent (compressed KV and rotary key side by side in `dim`)."""
    layer_runs: int = 1
    """Number of segments per head. Each segment has the same number of layers. The writer chooses the number,
    and readers accept any number."""
    engine: str = ""
    """Name of the only engine that shares these pages, because no test compares both engines' bytes. "" if
    both engines share them."""
    group: tuple[int, ...] = ()
    """Numbers of the model's layers in this page, if the other layers are in other pages. () for all
    layers."""
    window: int = 0
    """Number of tokens to which the layers in `group` attend, or 0 for all tokens."""
    quantised: str = ""
    """Format of values that are stored in one byte each with scale 1, or "" if values have the dtype
    `dtype`."""
    state: str = ""
    """Kind, shapes and dtypes of a recurrent state, or "" for KV. A page with a state has one state of `dim`
    bytes per layer instead of `page_tokens` rows: the state after the page's last token. Each "head" in
    `heads` is the part of the state on one rank."""
    model_state: str = ""
    """`state` of the model's recurrent layers, if this page belongs to the attention layers. The precision of
    the state affects the KV in this page. "" if the model has no recurrent layers."""

    def __post_init__(self) -> None:
        of_bytes = self.dtype == "uint8"
        if not (self.state or self.quantised in QUANTISED_FORMATS if of_bytes else self.dtype in ITEM_BYTES):
            raise LayoutError(
                f"KV caches with dtype {self.dtype!r} are not shared, only {', '.join(ITEM_BYTES)}",
                reason="kv_dtype",
            )
        if min(self.page_tokens, self.heads, self.layers, self.dim, self.planes) < 1:
            raise LayoutError(f"empty page: {self}", reason="layout")
        if self.group and len(self.group) != self.layers:
            raise LayoutError(f"number of layers does not match group: {self}", reason="layout")
        if self.layer_runs < 1 or self.layers % self.layer_runs or self.segments > MAX_SEGMENTS:
            raise LayoutError(f"invalid number of segments: {self}", reason="layout")

    @property
    def rows(self) -> int:
        """Number of rows in a plane of a layer: one row per token, or one row for a state."""
        return 1 if self.state else self.page_tokens

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(heads, layers, planes, rows, dim)."""
        return self.heads, self.layers, self.planes, self.rows, self.dim

    @property
    def segments(self) -> int:
        """Number of segments in a page that is written with this geometry."""
        return self.heads * self.layer_runs

    @property
    def layer_bytes(self) -> int:
        """Size in bytes of one head in one layer."""
        return self.planes * self.rows * self.dim * ITEM_BYTES.get(self.dtype, 1)

    @property
    def segment_bytes(self) -> int:
        return self.layers // self.layer_runs * self.layer_bytes

    @property
    def page_bytes(self) -> int:
        return self.heads * self.layers * self.layer_bytes

    def runs_for_segments(self, segments: int) -> int | None:
        """Return the number of runs of layers in a page with this number of segments.

        Returns None if a page with this geometry cannot have this number of segments.
        """
        runs, rest = divmod(segments, self.heads)
        return runs if runs and not rest and not self.layers % runs else None

    def spec(self) -> dict[str, Any]:
        """Return the fields of the geometry that are part of a page's key."""
        fields: dict[str, Any] = {
            "layout": "head-layer-kv-token-dim/1",
            "shape": list(self.shape),
            "dtype": self.dtype,
        }
        named = {"engine": self.engine, "quantised": self.quantised, "beside": self.model_state}
        fields |= {name: value for name, value in named.items() if value}
        if self.state:
            fields["state"] = {"of": self.state, "every": self.page_tokens}
        if self.group:
            fields["group"] = {"layers": list(self.group), "window": self.window}
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlice:
    """Heads and layers of a page that one rank holds."""

    heads: range
    layers: range
    writes: bool
    """Whether this rank writes the heads. False if another rank writes the same heads, because the TP degree
    is above the number of KV heads."""

    def run_range(self, page: PageGeometry, runs_per_head: int) -> range:
        """Return the runs that contain this rank's layers, in a page with `runs` runs of layers per head."""
        size = page.layers // runs_per_head
        return range(self.layers.start // size, -(-self.layers.stop // size))


def count_layer_runs(layers: int, first_layers: Iterable[int]) -> int:
    """Return the smallest number of equal runs of layers such that no pipeline stage begins inside a run."""
    return layers // math.gcd(layers, *first_layers)


def tensor_parallel_heads(total_heads: int, tp_size: int, tp_rank: int) -> tuple[range, bool]:
    """Return (KV heads of a tensor-parallel rank, whether this rank writes them).

    As in both engines, heads are divided evenly among the ranks. If there are more ranks than heads, each
    head is on `tp_size / total_heads` neighbouring ranks, and the first of these ranks writes it.

    Raises LayoutError if neither number is a multiple of the other.
    """
    if total_heads % tp_size == 0:
        per_rank = total_heads // tp_size
        return range(tp_rank * per_rank, (tp_rank + 1) * per_rank), True
    if tp_size % total_heads == 0:
        replicas = tp_size // total_heads
        head = tp_rank // replicas
        return range(head, head + 1), tp_rank % replicas == 0
    raise LayoutError(f"{total_heads} KV heads do not split over {tp_size} ranks", reason="layout")


def pages_between(start_token: int, end_token: int, page_tokens: int) -> range:
    """Return the numbers of pages: from the page that contains `start_token` to the last page that ends at or
    before `end_token`."""
    return range(start_token // page_tokens, end_token // page_tokens)
