"""Tables for components in a plan's input: their sizes, and their speed on each device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from cornplug.planner.inputs.field_types import (
    Count,
    Engine,
    Flag,
    GeneratorServer,
    InputPath,
    InputTable,
    Kind,
    Model,
    Name,
    NonNegative,
    NonNegativeInt,
    Positive,
    Quantisation,
    Share,
    field_error,
)
from cornplug.planner.inputs.llm_shape import LLMShape

_ALLOWED_SIZES: Final[Mapping[str, tuple[float, ...]]] = {
    "tp": (1, 2, 4, 8),
    "pp": (1, 2, 4, 8),
    "dp": (1, 2, 4, 8),
    "dcp": (1, 2, 4, 8),
    "pcp": (1, 2, 4, 8),
    "shares": (0.25, 0.5, 1.0),
}
TP_DEGREES: Final = tuple(map(int, _ALLOWED_SIZES["tp"]))
_SIZES_REMEDY: Final = "Choose from {allowed}, which let replicas pack exactly onto nodes."


class TowerShape(InputTable):
    """Size of a vision or audio tower with its projector."""

    kind: Literal["tower"] = "tower"
    """Set from the component's kind."""
    layers: Count
    """Number of blocks."""
    hidden: Count
    """Hidden size."""
    intermediate: Count
    """Hidden size of the MLP."""
    parameters: Positive
    """Number of weights."""
    patches_per_token: Count = 1
    """Patches for each token that the LLM receives (4 for Qwen2-VL)."""


class GeneratorShape(InputTable):
    """Size of a model that generates images or speech."""

    kind: Literal["generator"] = "generator"
    """Set from the component's kind."""
    parameters: Positive
    """Number of weights."""
    flops_per_unit: Positive
    """Floating-point operations per image or second of speech."""


class ThroughputProfile(InputTable):
    """Throughput of one replica that was measured elsewhere, without times."""

    kind: Literal["throughput"] = "throughput"
    """Selects this kind of profile."""
    gpu: str
    """GPU type."""
    tp: Count = 1
    """Tensor-parallel degree."""
    pp: Count = 1
    """Pipeline-parallel degree."""
    engine: Engine | None = None
    """Engine that was measured. By default, the profile applies to both engines."""
    quantisation: Quantisation = "none"
    """Quantisation of the weights."""
    role: Literal["E", "P", "D", "PD", "EPD", "G"] | None = None
    """Role that was measured. By default, the profile applies to all roles."""
    requests_per_s: Positive | dict[str, Positive]
    """Requests per second of one replica, for all classes or by "application/request"."""
    tpot_s: dict[str, Positive] = Field(default_factory=dict)
    """Seconds per output token at this throughput, by class."""
    source: str = "given"
    """Machine, date and versions of the measurement."""


class MeasuredProfile(InputTable):
    """Times measured on a device."""

    kind: Literal["table"] = "table"
    """Selects this kind of profile."""
    gpu: str
    """GPU type."""
    tp: Count = 1
    """Tensor-parallel degree."""
    pp: Count = 1
    """Pipeline-parallel degree."""
    engine: Engine | None = None
    """Engine that was measured. By default, the profile applies to both engines."""
    quantisation: Quantisation = "none"
    """Quantisation of the weights."""
    file: InputPath | None = None
    """CSV file of `cornplug profile`, in place of the points below."""
    prefill_tokens: list[Count] = Field(default_factory=list)
    """Prompt tokens per iteration, ascending."""
    prefill_s: list[Positive] = Field(default_factory=list)
    """Seconds of an iteration with each number of prompt tokens."""
    decode_requests: list[Count] = Field(default_factory=list)
    """Requests in a decode batch, ascending."""
    decode_s: list[Positive] = Field(default_factory=list)
    """Seconds of a decode iteration with each number of requests."""
    kv_token_s: NonNegative = 0.0
    """Seconds of a decode iteration for each token of context in the batch."""
    mixed_factor: Positive = 1.0
    """Factor on the longer of both times, for iterations with prefill and decode."""
    request_overhead_s: NonNegative = 0.0
    """Seconds per request that do not occupy the device."""
    encode_patches: list[Count] = Field(default_factory=list)
    """Patches in one pass of a tower, ascending."""
    encode_s: list[Positive] = Field(default_factory=list)
    """Seconds of a pass with each number of patches."""
    units: list[Positive] = Field(default_factory=list)
    """Units per request of a generator, ascending."""
    unit_s: list[Positive] = Field(default_factory=list)
    """Seconds of a request with each number of units."""
    kv_tokens: Count | None = None
    """Tokens of KV cache that the engine reported, by default computed from the GPU's memory."""
    source: str = "measured"
    """Machine, date and versions of the measurement."""


class RooflineProfile(InputTable):
    """Times estimated as max(FLOP / (efficiency·peak), bytes / (efficiency·bandwidth))."""

    kind: Literal["roofline"] = "roofline"
    """Selects this kind of profile."""
    gpu: str | None = None
    """GPU type, by default all types."""
    compute_efficiency: Share | None = None
    """Fraction of the GPU's peak FLOPS. By default, it is fitted to published measurements for LLMs, and 0.5
    for other components."""
    bandwidth_efficiency: Share = 0.85
    """Fraction of the GPU's memory bandwidth."""
    step_overhead_s: NonNegative = 0.0003
    """Seconds added to each iteration."""
    request_overhead_s: NonNegative = 0.035
    """Seconds per request that do not occupy the device."""


Profile = Annotated[ThroughputProfile | MeasuredProfile | RooflineProfile, Field(discriminator="kind")]


class ComponentResources(InputTable):
    """Devices for `cornplug launch`, which uses the component's first engine, tp and share."""

    device: Literal["gpu", "cpu"] = "gpu"
    """Run on GPUs or on CPU cores."""
    devices: list[NonNegativeInt] = Field(default_factory=list)
    """Indices of the GPUs or cores, with tp indices for each replica. By default, the next free devices."""
    replicas: Count = 1
    """Number of identical processes. Replicas of an encoder form one service."""
    port: Annotated[int, Field(ge=1, le=65535, strict=True)] | None = None
    """Port of the first replica, by default the next free port from `launch.port` on."""
    flags: list[str] = Field(default_factory=list)
    """Extra flags, which override the flags that cornplug derives."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables to add."""
    command: list[Model] = Field(default_factory=list)
    """Command of a generator without `server`. "{port}" and "{host}" are replaced."""
    health: str = "/health"
    """URL path that returns status 200 when the server of `command` is ready."""


SHAPES: Final[Mapping[str, type[LLMShape | TowerShape | GeneratorShape]]] = {
    "encoder": TowerShape,
    "llm": LLMShape,
    "generator": GeneratorShape,
}
"""Component kind -> pydantic model of the component's `shape` table."""
SHAPE_KINDS: Final[Mapping[str, str]] = {
    kind: table.model_fields["kind"].default for kind, table in SHAPES.items()
}


def _allowed_sizes_schema(key: str) -> dict[str, JsonValue]:
    """Return the part of a field's JSON schema that lists its allowed sizes."""
    return {"items": {"enum": list(_ALLOWED_SIZES[key])}, "minItems": 1}


class Component(InputTable):
    """A model, tower or generator that applications use."""

    name: Name
    """Name of the component."""
    kind: Kind
    """"encoder" is a vision or audio tower, and "generator" makes images or speech from an LLM's output."""
    model: Model | None = None
    """Hub id or folder for the command line, by default `checkpoint`."""
    checkpoint: InputPath | None = None
    """Folder whose config.json gives the shape, and whose weights give the fingerprint."""
    shape: Annotated[LLMShape | TowerShape | GeneratorShape, Field(discriminator="kind")] | None = None
    """Size of the component, if there is no checkpoint."""
    fingerprint: str | None = None
    """Fingerprint of the tower's weights. Encoders with the same fingerprint become one service."""
    tower_of: Name | None = None
    """LLM component whose checkpoint contains this tower (encoder only)."""
    quantisations: list[Quantisation] = Field(default=["none"])
    """Quantisations of the weights to choose from."""
    prefill_quantisations: list[Quantisation] | None = Field(default=None, min_length=1)
    """Quantisations for engines that only prefill, by default `quantisations`."""
    decode_quantisations: list[Quantisation] | None = Field(default=None, min_length=1)
    """Quantisations for engines that only decode, by default `quantisations`."""
    tp: list[Count] = Field(default=[1, 2, 4, 8], json_schema_extra=_allowed_sizes_schema("tp"))
    """Tensor-parallel degrees to choose from."""
    pp: list[Count] = Field(default=[1], json_schema_extra=_allowed_sizes_schema("pp"))
    """Pipeline-parallel degrees to choose from."""
    dp: list[Count] = Field(default=[1], json_schema_extra=_allowed_sizes_schema("dp"))
    """Attention data-parallel degrees to choose from, for mixtures of experts on tp * dp GPUs."""
    dcp: list[Count] = Field(default=[1], json_schema_extra=_allowed_sizes_schema("dcp"))
    """Decode context-parallel degrees to choose from (vLLM). Needs MLA, or a tp above the number of KV
    heads."""
    pcp: list[Count] = Field(default=[1], json_schema_extra=_allowed_sizes_schema("pcp"))
    """Prefill context-parallel degrees to choose from (vLLM, MLA models without media)."""
    expert_parallel: Flag = False
    """Place whole experts on each GPU instead of a shard of every expert."""
    shares: list[Positive] = Field(default=[1.0], json_schema_extra=_allowed_sizes_schema("shares"))
    """Fractions of a GPU that a replica may use."""
    engines: list[Engine] = Field(default=["vllm", "sglang"])
    """Engines to choose from."""
    tower: Literal["engine", "service"] = "engine"
    """LLM only. With "service", engines load no tower. Requests with media then fail while no encoder service
    is available."""
    server: GeneratorServer | None = None
    """Generator only: server program for which cornplug creates the command. By default, you start your own
    server."""
    speculative: Literal["none", "mtp", "eagle3"] = "none"
    """Speculative decoding with the model's own draft layers (mtp) or a draft model (eagle3)."""
    speculative_model: Model | None = None
    """Hub id or folder of the draft model for eagle3."""
    acceptance: Share = 0.0
    """Measured fraction of draft tokens that are accepted. With 0, the plan ignores speculation."""
    max_model_len: Count | None = None
    """Maximum tokens of a request, by default the model's own limit."""
    profiles: list[Profile] = Field(default=[RooflineProfile()], min_length=1)
    """Speed of the component. The first profile that matches GPU, engine, degrees and quantisation is
    used."""
    resources: ComponentResources | None = None
    """Devices on this host, for `cornplug launch`."""

    @model_validator(mode="before")
    @classmethod
    def _set_shape_kind(cls, table: Any) -> Any:
        """Set `kind` of the shape from the component's kind, if the table of the shape omits it."""
        if not isinstance(table, dict) or not isinstance(table.get("shape"), dict):
            return table
        kind = SHAPE_KINDS.get(str(table.get("kind")))
        if kind is None:
            return table
        said = table["shape"].get("kind", kind)
        if said != kind:
            remedy = f'Write kind = "{kind}" in the shape, or omit it.'
            raise field_error(
                "shape", f"shape of kind {said!r} in a component of kind {table['kind']!r}", remedy
            )
        return {**table, "shape": {"kind": kind, **table["shape"]}}

    def quantisations_for(self, tasks: str) -> list[Quantisation]:
        """Return the quantisations that a service with these tasks may use. `tasks` are letters of "EPDG"."""
        if "P" in tasks and "D" not in tasks:
            return self.prefill_quantisations or self.quantisations
        if "D" in tasks and "P" not in tasks:
            return self.decode_quantisations or self.quantisations
        return self.quantisations

    @property
    def model_argument(self) -> str:
        """Model for the command line of an engine."""
        return self.model or str(self.checkpoint or self.name)

    @property
    def any_quantisations(self) -> set[Quantisation]:
        """Quantisations that any service of the component may use."""
        return {q for tasks in ("PD", "P", "D") for q in self.quantisations_for(tasks)}

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        for error in self._errors():
            raise error
        return self

    def _errors(self) -> Iterator[Exception]:
        wanted = SHAPE_KINDS[self.kind]
        if self.shape is not None and self.shape.kind != wanted:
            yield field_error("shape", f"{self.kind} {self.name!r} has a {self.shape.kind} shape", "Fix it.")
        if self.tower != "engine" and self.kind != "llm":
            yield field_error("tower", f"{self.kind} {self.name!r} has no engine", "Remove it.")
        if self.tower_of is not None and self.kind != "encoder":
            yield field_error(
                "tower_of", f"{self.name!r} is not an encoder", 'Remove it, or write kind = "encoder".'
            )
        for key in ("prefill_quantisations", "decode_quantisations"):
            if self.kind != "llm" and getattr(self, key) is not None:
                yield field_error(
                    key, f"{self.kind} {self.name!r} neither prefills nor decodes", "Remove it."
                )
        yield from self.parallelism_errors()
        for key in ("dcp", "pcp"):
            if all(degree == 1 for degree in getattr(self, key)):
                continue
            if self.kind != "llm":
                yield field_error(key, f"{self.kind} {self.name!r} has no KV", "Remove it.")
            elif "vllm" not in self.engines:
                yield field_error(key, "supported on vLLM only", 'Add "vllm" to engines, or remove the key.')
        for key, allowed in _ALLOWED_SIZES.items():
            chosen = getattr(self, key)
            if not chosen or not set(chosen) <= set(allowed):
                remedy = _SIZES_REMEDY.format(allowed=", ".join(f"{a:g}" for a in allowed))
                yield field_error(key, f"{chosen} is not a list of allowed sizes", remedy)

    def parallelism_errors(self) -> Iterator[PydanticCustomError]:
        """Yield the reasons why the component cannot have expert parallelism or attention data parallelism.

        If the shape is not in the input but in a checkpoint, call this again when the checkpoint has been
        read.
        """
        key = "dp" if any(degree > 1 for degree in self.dp) else "expert_parallel"
        if key == "expert_parallel" and not self.expert_parallel:
            return
        if self.kind != "llm":
            yield field_error(key, f"{self.kind} {self.name!r} has no experts", "Remove it.")
        elif isinstance(self.shape, LLMShape) and self.shape.active_parameters is None:
            yield field_error(
                key,
                f"{self.name!r} is a dense model without experts",
                "Remove it. For a dense model, replicas take the place of data parallelism.",
            )
        elif isinstance(self.shape, LLMShape) and self.shape.experts is None:
            yield field_error(
                key,
                f"the number of experts of {self.name!r} is unknown",
                "Add experts and experts_per_token to its shape.",
            )
