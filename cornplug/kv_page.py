"""Engine-neutral KV page: its geometry, and the bytes that each rank owns.

A page holds `page_tokens` tokens of every layer, head outermost:

    [kv_head][layer][K, V][token][dim]

With MLA there is one head and one plane of latent vectors. Every rank holds it, and the first rank writes it.

A tensor-parallel rank has a contiguous range of heads, so it reads and writes contiguous bytes. Pages can be
read with another TP or PP degree than they were written with. The unit of integrity is the *segment*: one
head of all layers, or of a run of layers that no pipeline stage of the writer splits. A page has few
segments, because each costs a call per copy and 8 bytes of the header. Keys are cached after rotary
embedding, as in both engines.

A page of recurrent states has one row per layer, and a rank's part of the state in place of a head. It can
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
"""K and V. MLA caches one latent plane instead."""

QUANTISED = frozenset({"fp8_e4m3", "fp8_e5m2"})
"""Formats of one-byte values in pages."""

MAX_SEGMENTS = 0xFFFF
"""Maximum number of segments in a header."""


class PageSize(Protocol):
    """Size of a page, or of one page of each of several kinds."""

    @property
    def page_tokens(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class WholePage:
    """Size of one page of each kind together."""

    page_tokens: int
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGeometry:
    """Shape of the pages of a model. It does not depend on the parallelism of the engine."""

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
    """Number of segments per head, with equally many layers each. The writer chooses it, and readers accept
    any."""
    engine: str = ""
    """The only engine that shares these pages, if no test compares both engines' bytes. "" for both
    engines."""
    group: tuple[int, ...] = ()
    """Numbers of the model's layers in this page, if other pages contain the others. () for all layers."""
    window: int = 0
    """Number of tokens that the layers of such a group attend to. 0 for all tokens."""
    quantised: str = ""
    """Format of values that are stored in one byte each with scale 1. "" for values of `dtype`."""
    state: str = ""
    """Kind, shapes and dtypes of a recurrent state. Such a page contains one state of `dim` bytes per layer
    instead of `page_tokens` rows: the state after the page's last token. Each of the `heads` is the part of
    the state on one rank."""
    beside: str = ""
    """`state` of the model's other layers, whose precision affects the values of these layers. "" for
    none."""

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
            raise LayoutError(f"number of layers does not match group: {self}", reason="layout")
        if self.layer_runs < 1 or self.layers % self.layer_runs or self.segments > MAX_SEGMENTS:
            raise LayoutError(f"invalid number of segments: {self}", reason="layout")

    @property
    def rows(self) -> int:
        """Number of rows in a plane of a layer: one per token, or one state."""
        return 1 if self.state else self.page_tokens

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(heads, layers, planes, rows, dim)."""
        return self.heads, self.layers, self.planes, self.rows, self.dim

    @property
    def segments(self) -> int:
        """Number of segments of a page as written by this engine."""
        return self.heads * self.layer_runs

    @property
    def layer_bytes(self) -> int:
        """Bytes of one head of one layer."""
        return self.planes * self.rows * self.dim * ITEM_BYTES.get(self.dtype, 1)

    @property
    def segment_bytes(self) -> int:
        return self.layers // self.layer_runs * self.layer_bytes

    @property
    def page_bytes(self) -> int:
        return self.heads * self.layers * self.layer_bytes

    def runs_in(self, segments: int) -> int | None:
        """Return the runs of layers in a page with this number of segments, or None if no page can have
        it."""
        runs, rest = divmod(segments, self.heads)
        return runs if runs and not rest and not self.layers % runs else None

    def spec(self) -> dict[str, Any]:
        """Return the fields of the geometry that are part of a page's identity."""
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
    """Heads and layers of a page on one rank."""

    heads: range
    layers: range
    writes: bool
    """False if another rank writes the same heads (TP degree above the number of KV heads)."""

    def runs(self, page: PageGeometry, runs: int) -> range:
        """Return the runs that contain the layers of this slice, in a page with `runs` runs per head."""
        size = page.layers // runs
        return range(self.layers.start // size, -(-self.layers.stop // size))


def layer_runs(layers: int, first_layers: Iterable[int]) -> int:
    """Return the smallest number of equal runs of layers that no pipeline stage splits."""
    return layers // math.gcd(layers, *first_layers)


def tensor_parallel_heads(total_heads: int, tp_size: int, tp_rank: int) -> tuple[range, bool]:
    """Return the KV heads of a tensor-parallel rank, and whether this rank writes them.

    Like in both engines, heads are split evenly. If there are more ranks than heads, each head is on
    `tp_size / total_heads` neighbouring ranks, of which the first writes it.

    Raises LayoutError if neither number divides the other.
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
    """Return the pages that contain tokens [start, end), where `end` is rounded down to a page boundary."""
    return range(start_token // page_tokens, end_token // page_tokens)
