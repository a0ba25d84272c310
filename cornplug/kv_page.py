"""The engine-neutral page of KV: its geometry, and which bytes a rank owns.

A page holds `page_tokens` tokens of every layer, head outermost:

    [kv_head][layer][K, V][token][dim]

(MLA: one head and one plane of latent vectors, which every rank holds and the first writes),
so that a tensor-parallel rank with a contiguous range of heads reads and writes contiguous
bytes, and any TP or PP degree can read pages that another wrote. The unit of integrity is the
*segment*: one head of all layers, or of as many of them as the writer's pipeline stages leave whole. A
page has few: each is a call on the way of the page, and 8 bytes in its header. Keys are cached after
rotary embedding, as both engines do. A page of recurrent states has one row for each layer instead, and a
rank's part of the state in place of a head: only the same TP degree reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from cornplug.codec import ITEM_BYTES
from cornplug.errors import LayoutError

PLANES = 2
"""K and V. MLA caches one latent plane instead."""

QUANTISED = frozenset({"fp8_e4m3", "fp8_e5m2"})
"""Formats of one-byte values that pages can hold."""

MAX_SEGMENTS = 0xFFFF
"""The kinds of payload that a header can name."""


class PageSize(Protocol):
    """The size of a page, or of one page of each of several kinds."""

    @property
    def page_tokens(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class WholePage:
    """One page of each kind, as one size."""

    page_tokens: int
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGeometry:
    """The shape of every page of one model, at any parallelism of the engine."""

    page_tokens: int
    heads: int
    """KV heads of the whole model."""
    layers: int
    """Attention layers of the whole model."""
    dim: int
    dtype: str
    """torch's name without "torch.": float32, float16 or bfloat16; uint8 for `quantised` values."""
    planes: int = PLANES
    """2: keys and values. 1: MLA's latent (compressed KV and rotary key side by side in `dim`)."""
    layer_runs: int = 1
    """Segments of a head, of equally many layers each. The writer's choice: readers take any."""
    engine: str = ""
    """The only engine that shares these pages, where no test compares both engines' bytes; "" for both."""
    group: tuple[int, ...] = ()
    """Numbers of the model's layers in this page, where other pages hold the others; () where it has all."""
    window: int = 0
    """Tokens that the layers of such a group attend to; 0: all."""
    quantised: str = ""
    """The format of values that are kept in one byte each, all with the scale 1; "" for those of `dtype`."""
    state: str = ""
    """Kind, shapes and dtypes of a recurrent state, where a page holds one state for each layer instead of
    `page_tokens` rows: `dim` bytes, as they are after the page's last token. Each of the `heads` is a rank's,
    as it holds its part of the state."""
    beside: str = ""
    """`state` of the model's other layers, whose precision is part of these layers' values; "" for none."""

    def __post_init__(self) -> None:
        of_bytes = self.dtype == "uint8"
        if not (self.state or self.quantised in QUANTISED if of_bytes else self.dtype in ITEM_BYTES):
            raise LayoutError(
                f"kv cache dtype {self.dtype!r} is not shared; {', '.join(ITEM_BYTES)} are",
                reason="kv_dtype",
            )
        if min(self.page_tokens, self.heads, self.layers, self.dim, self.planes) < 1:
            raise LayoutError(f"empty page: {self}", reason="layout")
        if self.group and len(self.group) != self.layers:
            raise LayoutError(f"a page of other layers than it names: {self}", reason="layout")
        if self.layer_runs < 1 or self.layers % self.layer_runs or self.segments > MAX_SEGMENTS:
            raise LayoutError(f"a page of no segments: {self}", reason="layout")

    @property
    def rows(self) -> int:
        """Rows of a layer's planes: one for each token, or one state."""
        return 1 if self.state else self.page_tokens

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(heads, layers, planes, rows, dim)."""
        return self.heads, self.layers, self.planes, self.rows, self.dim

    @property
    def segments(self) -> int:
        """Segments of a page as this engine writes it."""
        return self.heads * self.layer_runs

    @property
    def layer_bytes(self) -> int:
        """Of one head of one layer."""
        return self.planes * self.rows * self.dim * ITEM_BYTES.get(self.dtype, 1)

    @property
    def segment_bytes(self) -> int:
        return self.layers // self.layer_runs * self.layer_bytes

    @property
    def page_bytes(self) -> int:
        return self.heads * self.layers * self.layer_bytes

    def runs_in(self, segments: int) -> int | None:
        """Runs of layers in a page that was written as so many segments; None where no page has so many."""
        runs, rest = divmod(segments, self.heads)
        return runs if runs and not rest and not self.layers % runs else None

    def spec(self) -> dict[str, Any]:
        """The fields of the geometry that belong to a page's identity."""
        fields: dict[str, Any] = {
            "layout": "head-layer-kv-token-dim/1",
            "shape": list(self.shape),
            "dtype": self.dtype,
        }
        named = {"engine": self.engine, "quantised": self.quantised, "beside": self.beside}
        fields |= {name: value for name, value in named.items() if value}
        if self.state:
            fields["state"] = {"of": self.state, "every": self.page_tokens}
        if self.group:
            fields["group"] = {"layers": list(self.group), "window": self.window}
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlice:
    """The heads and layers of a page that one rank holds."""

    heads: range
    layers: range
    writes: bool
    """False for a rank whose heads another rank holds as well (TP degree above the KV heads)."""

    def runs(self, page: PageGeometry, runs: int) -> range:
        """The runs of layers that hold this slice's, in a page with so many of each head."""
        size = page.layers // runs
        return range(self.layers.start // size, -(-self.layers.stop // size))


def layer_runs(layers: int, first_layers: Iterable[int]) -> int:
    """The fewest equal runs of layers that pipeline stages, by their first layers, leave whole."""
    return layers // math.gcd(layers, *first_layers)


def tensor_parallel_heads(total_heads: int, tp_size: int, tp_rank: int) -> tuple[range, bool]:
    """The KV heads of one tensor-parallel rank, and whether it is the one that writes them.

    Follows both engines: heads are split evenly; with more ranks than heads each head is
    held by `tp_size / total_heads` neighbouring ranks, of which the first writes.

    Raises LayoutError when neither number divides the other.
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
    """The pages that touch tokens [start, end); `end` is cut down to a page boundary."""
    return range(start_token // page_tokens, end_token // page_tokens)
