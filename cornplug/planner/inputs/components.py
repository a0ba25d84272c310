"""Components as a plan's input describes them: their sizes, and how fast they are where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from cornplug.planner.inputs.field_types import (
    Count,
    Engine,
    InputPath,
    InputTable,
    Kind,
    Model,
    Name,
    NonNegative,
    Positive,
    Quantisation,
    Share,
    wrong,
)


class LLMShape(InputTable):
    """A language model's size. `from_config` in `component_shapes.py` reads it from a checkpoint."""

    kind: Literal["llm"] = "llm"
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    parameters: Positive
    """All weights, of experts too."""
    active_parameters: Positive | None = None
    """Weights that one token passes through; None: all of them."""
    mla_rank: int | None = None
    """kv_lora_rank + qk_rope_head_dim of a model with latent attention (MLA)."""
    max_context: Count = 32_768
    embedding_parameters: NonNegative = 0.0
    """Of all, those of embeddings and head: quantisation leaves them alone."""

    @model_validator(mode="after")
    def _parts_of_the_whole(self) -> Self:
        if self.kv_heads > self.heads:
            raise wrong("kv_heads", f"{self.kv_heads} of {self.heads} heads", "Write at most as many.")
        for key in ("active_parameters", "embedding_parameters"):
            part = getattr(self, key)
            if part is not None and part > self.parameters:
                raise wrong(key, f"{part:g} of {self.parameters:g} parameters", "Write at most as many.")
        return self


class TowerShape(InputTable):
    kind: Literal["tower"] = "tower"
    layers: Count
    hidden: Count
    intermediate: Count
    parameters: Positive
    patches_per_token: Count = 1
    """Patches that the tower computes for one token that the LLM sees (Qwen2-VL: 4)."""


class GeneratorShape(InputTable):
    kind: Literal["generator"] = "generator"
    parameters: Positive
    flops_per_unit: Positive
    """Floating-point operations for one unit (an image, a second of speech)."""


class ThroughputProfile(InputTable):
    """Requests a second that one replica carries, as measured elsewhere; no times are known."""

    kind: Literal["throughput"] = "throughput"
    gpu: str
    tp: Count = 1
    pp: Count = 1
    engine: Engine | None = None
    quantisation: Quantisation = "none"
    role: Literal["E", "P", "D", "PD", "EPD", "G"] | None = None
    """For an LLM whose roles differ (DistServe's P 5.6 and D 10 requests/s); None: any role."""
    requests_per_s: Positive | dict[str, Positive]
    """For every request type alike, or by "application/request"."""
    tpot_s: dict[str, Positive] = Field(default_factory=dict)
    """Seconds per token at this rate, by request type, where the rate was measured under an SLO."""
    source: str = "given"


class MeasuredProfile(InputTable):
    """Times measured on a device: inline points, or a CSV file of `cornplug profile`."""

    kind: Literal["table"] = "table"
    gpu: str
    tp: Count = 1
    pp: Count = 1
    engine: Engine | None = None
    quantisation: Quantisation = "none"
    file: InputPath | None = None
    prefill_tokens: list[Count] = Field(default_factory=list)
    prefill_s: list[Positive] = Field(default_factory=list)
    """Seconds of one iteration that computes so many prompt tokens."""
    decode_requests: list[Count] = Field(default_factory=list)
    decode_s: list[Positive] = Field(default_factory=list)
    """Seconds of one iteration that gives so many requests one token each."""
    kv_token_s: NonNegative = 0.0
    """Added to a decode iteration for each token of context in the batch."""
    mixed_factor: Positive = 1.0
    """An iteration of both kinds takes the longer of the two times this (Splitwise: 1.1)."""
    request_overhead_s: NonNegative = 0.0
    """Of an engine's API process, network and tokenizer, once a request, off the device."""
    encode_patches: list[Count] = Field(default_factory=list)
    encode_s: list[Positive] = Field(default_factory=list)
    units: list[Positive] = Field(default_factory=list)
    unit_s: list[Positive] = Field(default_factory=list)
    kv_tokens: Count | None = None
    """Tokens of KV cache that the engine reported; None: from shape and memory."""
    source: str = "measured"
    """Machine, date and versions of the measurement."""


class RooflineProfile(InputTable):
    """Times from the GPU table: max(FLOP / (efficiency·peak), bytes / (efficiency·bandwidth))."""

    kind: Literal["roofline"] = "roofline"
    compute_efficiency: Share = 0.5
    bandwidth_efficiency: Share = 0.8
    step_overhead_s: NonNegative = 0.003
    request_overhead_s: NonNegative = 0.005


Profile = Annotated[ThroughputProfile | MeasuredProfile | RooflineProfile, Field(discriminator="kind")]


_SHAPE_KINDS: Final = {"encoder": "tower", "llm": "llm", "generator": "generator"}
_CHAIN: Final = (
    "Write some of {allowed}: sizes that divide each other are what makes packing onto nodes exact."
)


class Component(InputTable):
    name: Name
    kind: Kind
    model: Model | None = None
    """The model's name on the command line: a hub id or a folder. None: `checkpoint`."""
    checkpoint: InputPath | None = None
    """A folder with config.json; shape, and fingerprint where the weights are there, come from it."""
    shape: Annotated[LLMShape | TowerShape | GeneratorShape, Field(discriminator="kind")] | None = None
    fingerprint: str | None = None
    """Of the tower's weights: encoders with the same one are one service."""
    tower_of: Name | None = None
    """Encoder only: the LLM component whose checkpoint holds this tower."""
    quantisations: list[Quantisation] = Field(default=["none"])
    tp: list[Count] = Field(default=[1, 2, 4, 8])
    pp: list[Count] = Field(default=[1])
    shares: list[Positive] = Field(default=[1.0])
    """Parts of one GPU that a replica may have: 0.25, 0.5, 1."""
    engines: list[Engine] = Field(default=["vllm", "sglang"])
    speculative: Literal["none", "mtp", "eagle3"] = "none"
    speculative_model: Model | None = None
    acceptance: Share = 0.0
    """Share of draft tokens accepted, as measured. 0: speculation is not planned for."""
    max_model_len: Count | None = None
    profiles: list[Profile] = Field(default=[RooflineProfile()], min_length=1)
    """The first that fits a cell is taken."""

    @model_validator(mode="before")
    @classmethod
    def _shape_is_of_its_kind(cls, table: Any) -> Any:
        """`kind` need not be said twice."""
        if not isinstance(table, dict) or not isinstance(table.get("shape"), dict):
            return table
        kind = _SHAPE_KINDS.get(str(table.get("kind")))
        if kind is None:
            return table
        said = table["shape"].get("kind", kind)
        if said != kind:
            remedy = f'Write kind = "{kind}" there, or leave it out.'
            raise wrong("shape", f"a shape of kind {said!r} on a component of kind {table['kind']!r}", remedy)
        return {**table, "shape": {"kind": kind, **table["shape"]}}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for error in self._errors():
            raise error
        return self

    def _errors(self) -> Iterator[Exception]:
        wanted = _SHAPE_KINDS[self.kind]
        if self.shape is not None and self.shape.kind != wanted:
            yield wrong("shape", f"a {self.shape.kind}'s shape on {self.kind} {self.name!r}", "Give its own.")
        if self.tower_of is not None and self.kind != "encoder":
            yield wrong(
                "tower_of", f"{self.name!r} is no encoder", 'Leave it out, or write kind = "encoder".'
            )
        for key, allowed in (("tp", (1, 2, 4, 8)), ("pp", (1, 2, 4, 8)), ("shares", (0.25, 0.5, 1.0))):
            chosen = getattr(self, key)
            if not chosen or not set(chosen) <= set(allowed):
                remedy = _CHAIN.format(allowed=", ".join(f"{a:g}" for a in allowed))
                yield wrong(key, f"{chosen} is not of the chain 1/4, 1/2, 1, 2, 4, 8", remedy)
