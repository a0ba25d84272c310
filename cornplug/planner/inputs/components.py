"""Components as a plan's input describes them: their sizes, and how fast they are where."""

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
    Positive,
    Quantisation,
    Share,
    Whole,
    wrong,
)
from cornplug.planner.inputs.llm_shape import LLMShape


class TowerShape(InputTable):
    """Size of a vision or audio tower, projector included."""

    kind: Literal["tower"] = "tower"
    """Follows from the component's kind."""
    layers: Count
    """Blocks of the tower."""
    hidden: Count
    """Its width."""
    intermediate: Count
    """Width of its MLP."""
    parameters: Positive
    """All weights, of the projector too."""
    patches_per_token: Count = 1
    """Patches that the tower computes for one token that the LLM sees (Qwen2-VL: 4)."""


class GeneratorShape(InputTable):
    """Size of a model that makes images or speech."""

    kind: Literal["generator"] = "generator"
    """Follows from the component's kind."""
    parameters: Positive
    """All weights."""
    flops_per_unit: Positive
    """Floating-point operations for one unit (an image, a second of speech)."""


class ThroughputProfile(InputTable):
    """Requests a second that one replica carries, as measured elsewhere; no times are known."""

    kind: Literal["throughput"] = "throughput"
    """Must be written: it tells the three kinds of profiles apart."""
    gpu: str
    """Device type, of the GPU table."""
    tp: Count = 1
    """Tensor-parallel degree of the replica."""
    pp: Count = 1
    """Pipeline-parallel degree of the replica."""
    engine: Engine | None = None
    """Left out: either engine."""
    quantisation: Quantisation = "none"
    """Of the weights as measured."""
    role: Literal["E", "P", "D", "PD", "EPD", "G"] | None = None
    """For an LLM whose roles differ (DistServe's P 5.6 and D 10 requests/s). Left out: any role."""
    requests_per_s: Positive | dict[str, Positive]
    """For every request type alike, or by "application/request"."""
    tpot_s: dict[str, Positive] = Field(default_factory=dict)
    """Seconds per token at this rate, by request type, where the rate was measured under an SLO."""
    source: str = "given"
    """Machine, date and versions of the measurement."""


class MeasuredProfile(InputTable):
    """Times measured on a device: inline points, or a CSV file of `cornplug profile`."""

    kind: Literal["table"] = "table"
    """Must be written: it tells the three kinds of profiles apart."""
    gpu: str
    """Device type, of the GPU table."""
    tp: Count = 1
    """Tensor-parallel degree of the replica."""
    pp: Count = 1
    """Pipeline-parallel degree of the replica."""
    engine: Engine | None = None
    """Left out: either engine."""
    quantisation: Quantisation = "none"
    """Of the weights as measured."""
    file: InputPath | None = None
    """CSV of `cornplug profile`, in place of the points below; relative to the plan's file."""
    prefill_tokens: list[Count] = Field(default_factory=list)
    """Prompt tokens of one iteration, ascending."""
    prefill_s: list[Positive] = Field(default_factory=list)
    """Seconds of one iteration that computes so many prompt tokens."""
    decode_requests: list[Count] = Field(default_factory=list)
    """Requests that decode together, ascending."""
    decode_s: list[Positive] = Field(default_factory=list)
    """Seconds of one iteration that gives so many requests one token each."""
    kv_token_s: NonNegative = 0.0
    """Seconds added to a decode iteration for each token of context in the batch."""
    mixed_factor: Positive = 1.0
    """An iteration of both kinds takes the longer of the two times this (Splitwise: 1.1)."""
    request_overhead_s: NonNegative = 0.0
    """Seconds of an engine's API process, network and tokenizer, once a request, off the device."""
    encode_patches: list[Count] = Field(default_factory=list)
    """Patches of one pass of a tower, ascending."""
    encode_s: list[Positive] = Field(default_factory=list)
    """Seconds of a pass over so many patches."""
    units: list[Positive] = Field(default_factory=list)
    """Units of one request of a generator, ascending."""
    unit_s: list[Positive] = Field(default_factory=list)
    """Seconds of a request of so many units."""
    kv_tokens: Count | None = None
    """Tokens of KV cache that the engine reported. Left out: computed from shape and memory."""
    source: str = "measured"
    """Machine, date and versions of the measurement."""


class RooflineProfile(InputTable):
    """Times from the GPU table: max(FLOP / (efficiency·peak), bytes / (efficiency·bandwidth))."""

    kind: Literal["roofline"] = "roofline"
    """Must be written: it tells the three kinds of profiles apart."""
    gpu: str | None = None
    """Device type that it is for, of the GPU table. Left out: any."""
    compute_efficiency: Share | None = None
    """Part of the GPU's peak FLOPS that is reached. Left out: of an LLM by GPU generation, precision and
    experts, as fitted to published measurements; of a tower or generator 0.5."""
    bandwidth_efficiency: Share = 0.85
    """Part of the GPU's memory bandwidth that is reached."""
    step_overhead_s: NonNegative = 0.0003
    """Seconds added to each iteration, besides those of its layers."""
    request_overhead_s: NonNegative = 0.035
    """Seconds added to each request, off the device."""


Profile = Annotated[ThroughputProfile | MeasuredProfile | RooflineProfile, Field(discriminator="kind")]


class ComponentResources(InputTable):
    """One host's part for a component that `cornplug launch` starts from this file, with the first of the
    component's engines, tp and shares. `cornplug plan` chooses for itself."""

    device: Literal["gpu", "cpu"] = "gpu"
    """The host's GPUs, or its cores."""
    devices: list[Whole] = Field(default_factory=list)
    """Numbers of its GPUs or cores, in one row: tp for each replica. Left out: the next that no other
    component has."""
    replicas: Count = 1
    """Equal processes; those of an encoder are one service."""
    port: Annotated[int, Field(ge=1, le=65535, strict=True)] | None = None
    """Of the first replica, the others follow. Left out: the next from `launch.port` on."""
    flags: list[str] = Field(default_factory=list)
    """Flags of the engine or the service beside those that follow from this file; the last one of a name
    counts."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables beside the launcher's own."""
    command: list[Model] = Field(default_factory=list)
    """Generator without `server` only: its server's program and arguments, with "{port}" for the port and
    "{host}" for the address; ./NAME is beside the file."""
    health: str = "/health"
    """With `command`: path of the URL that answers 200 once the server serves."""


_SIZES: Final[Mapping[str, tuple[float, ...]]] = {
    "tp": (1, 2, 4, 8),
    "pp": (1, 2, 4, 8),
    "dp": (1, 2, 4, 8),
    "dcp": (1, 2, 4, 8),
    "pcp": (1, 2, 4, 8),
    "shares": (0.25, 0.5, 1.0),
}
TP_DEGREES: Final = tuple(map(int, _SIZES["tp"]))
SHAPES: Final[Mapping[str, type[LLMShape | TowerShape | GeneratorShape]]] = {
    "encoder": TowerShape,
    "llm": LLMShape,
    "generator": GeneratorShape,
}
"""Component's kind -> its shape's table."""
SHAPE_KINDS: Final[Mapping[str, str]] = {
    kind: table.model_fields["kind"].default for kind, table in SHAPES.items()
}
_CHAIN: Final = (
    "Write some of {allowed}: sizes that divide each other are what makes packing onto nodes exact."
)


def _chain(key: str) -> dict[str, JsonValue]:
    """Of a field's JSON schema: the sizes that it may list."""
    return {"items": {"enum": list(_SIZES[key])}, "minItems": 1}


class Component(InputTable):
    """A model, or a tower or generator of one, that applications use."""

    name: Name
    """Name in this file."""
    kind: Kind
    """Encoder: a vision or audio tower. Generator: makes images or speech from an LLM's output."""
    model: Model | None = None
    """The model's name on the command line: a hub id or a folder. Left out: `checkpoint`."""
    checkpoint: InputPath | None = None
    """A folder with config.json; shape, and fingerprint where the weights are there, come from it."""
    shape: Annotated[LLMShape | TowerShape | GeneratorShape, Field(discriminator="kind")] | None = None
    """Its size, where no checkpoint says it."""
    fingerprint: str | None = None
    """Of the tower's weights: encoders with the same one are one service."""
    tower_of: Name | None = None
    """Encoder only: the LLM component whose checkpoint holds this tower."""
    quantisations: list[Quantisation] = Field(default=["none"])
    """Of the weights, among which the plan chooses."""
    prefill_quantisations: list[Quantisation] | None = Field(default=None, min_length=1)
    """Of the weights of engines that only prefill (P + D). Left out: `quantisations`."""
    decode_quantisations: list[Quantisation] | None = Field(default=None, min_length=1)
    """Of the weights of engines that only decode (P + D). Left out: `quantisations`."""
    tp: list[Count] = Field(default=[1, 2, 4, 8], json_schema_extra=_chain("tp"))
    """Tensor-parallel degrees among which the plan chooses."""
    pp: list[Count] = Field(default=[1], json_schema_extra=_chain("pp"))
    """Pipeline-parallel degrees among which the plan chooses."""
    dp: list[Count] = Field(default=[1], json_schema_extra=_chain("dp"))
    """Attention data-parallel degrees among which the plan chooses, of a mixture of experts: a replica has
    dp groups of tp GPUs, each with the attention's weights, requests and KV of its own; experts are spread
    over all tp * dp."""
    dcp: list[Count] = Field(default=[1], json_schema_extra=_chain("dcp"))
    """Decode context-parallel degrees among which the plan chooses, on vLLM: so many of a group's tp GPUs
    divide each request's KV where they would repeat it, with MLA or where tp is more than KV heads."""
    pcp: list[Count] = Field(default=[1], json_schema_extra=_chain("pcp"))
    """Prefill context-parallel degrees among which the plan chooses, on vLLM, of models with MLA that get no
    media: a replica has pcp groups of tp GPUs, which divide each prompt's tokens."""
    expert_parallel: Flag = False
    """Each GPU of a replica holds whole experts, not a part of each. The degree is tp * dp * pcp."""
    shares: list[Positive] = Field(default=[1.0], json_schema_extra=_chain("shares"))
    """Parts of one GPU that a replica may have: 0.25, 0.5, 1."""
    engines: list[Engine] = Field(default=["vllm", "sglang"])
    """Engines among which the plan chooses."""
    tower: Literal["engine", "service"] = "engine"
    """LLM only. "service": engines whose media all come from encoder services load no vision tower, and fail
    requests with media while no service answers. "engine": such engines then encode by themselves."""
    server: GeneratorServer | None = None
    """Generator only: the server whose command cornplug writes; its program must be on the PATH. Left out:
    your own server."""
    speculative: Literal["none", "mtp", "eagle3"] = "none"
    """Speculative decoding: by the model's own draft layers (mtp) or a draft model (eagle3)."""
    speculative_model: Model | None = None
    """The draft model of eagle3, a hub id or a folder."""
    acceptance: Share = 0.0
    """Share of draft tokens accepted, as measured. 0: speculation is not planned for."""
    max_model_len: Count | None = None
    """Tokens of the longest request that the engines take. Left out: the model's own limit."""
    profiles: list[Profile] = Field(default=[RooflineProfile()], min_length=1)
    """Its times; the first profile that fits GPU, engine, degrees and quantisation is taken."""
    resources: ComponentResources | None = None
    """Its part of the host, for `cornplug launch`."""

    @model_validator(mode="before")
    @classmethod
    def _shape_is_of_its_kind(cls, table: Any) -> Any:
        """`kind` need not be said twice."""
        if not isinstance(table, dict) or not isinstance(table.get("shape"), dict):
            return table
        kind = SHAPE_KINDS.get(str(table.get("kind")))
        if kind is None:
            return table
        said = table["shape"].get("kind", kind)
        if said != kind:
            remedy = f'Write kind = "{kind}" there, or leave it out.'
            raise wrong("shape", f"a shape of kind {said!r} on a component of kind {table['kind']!r}", remedy)
        return {**table, "shape": {"kind": kind, **table["shape"]}}

    def quantisations_for(self, tasks: str) -> list[Quantisation]:
        """Those of a service with these tasks of "EPDG"."""
        if "P" in tasks and "D" not in tasks:
            return self.prefill_quantisations or self.quantisations
        if "D" in tasks and "P" not in tasks:
            return self.decode_quantisations or self.quantisations
        return self.quantisations

    @property
    def any_quantisations(self) -> set[Quantisation]:
        """Those of some service."""
        return {q for tasks in ("PD", "P", "D") for q in self.quantisations_for(tasks)}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for error in self._errors():
            raise error
        return self

    def _errors(self) -> Iterator[Exception]:
        wanted = SHAPE_KINDS[self.kind]
        if self.shape is not None and self.shape.kind != wanted:
            yield wrong("shape", f"a {self.shape.kind}'s shape on {self.kind} {self.name!r}", "Give its own.")
        if self.tower != "engine" and self.kind != "llm":
            yield wrong("tower", f"{self.kind} {self.name!r} has no engine", "Leave it out.")
        if self.tower_of is not None and self.kind != "encoder":
            yield wrong(
                "tower_of", f"{self.name!r} is no encoder", 'Leave it out, or write kind = "encoder".'
            )
        for key in ("prefill_quantisations", "decode_quantisations"):
            if self.kind != "llm" and getattr(self, key) is not None:
                yield wrong(key, f"{self.kind} {self.name!r} neither prefills nor decodes", "Leave it out.")
        yield from self.parallelism_errors()
        for key in ("dcp", "pcp"):
            if all(degree == 1 for degree in getattr(self, key)):
                continue
            if self.kind != "llm":
                yield wrong(key, f"{self.kind} {self.name!r} has no KV", "Leave it out.")
            elif "vllm" not in self.engines:
                yield wrong(key, "it is planned on vLLM only", 'Add "vllm" to engines, or leave it out.')
        for key, allowed in _SIZES.items():
            chosen = getattr(self, key)
            if not chosen or not set(chosen) <= set(allowed):
                remedy = _CHAIN.format(allowed=", ".join(f"{a:g}" for a in allowed))
                yield wrong(key, f"{chosen} is not of the chain 1/4, 1/2, 1, 2, 4, 8", remedy)

    def parallelism_errors(self) -> Iterator[PydanticCustomError]:
        """Reasons why no replica can have the expert and attention data parallelism that are asked for.

        A shape that only a checkpoint says is checked when it is read.
        """
        key = "dp" if any(degree > 1 for degree in self.dp) else "expert_parallel"
        if key == "expert_parallel" and not self.expert_parallel:
            return
        if self.kind != "llm":
            yield wrong(key, f"{self.kind} {self.name!r} has no experts", "Leave it out.")
        elif isinstance(self.shape, LLMShape) and self.shape.active_parameters is None:
            yield wrong(
                key,
                f"{self.name!r} is dense: it has no experts to spread",
                "Leave it out. Replicas are a dense model's data parallelism.",
            )
        elif isinstance(self.shape, LLMShape) and self.shape.experts is None:
            yield wrong(
                key,
                f"the experts of {self.name!r} are not known",
                "Write experts and experts_per_token in its shape.",
            )
