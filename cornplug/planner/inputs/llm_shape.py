"""Size of a language model, from a plan's input or from config.json. The number of parameters is computed
from the sizes of the modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from pydantic import model_validator

from cornplug.errors import CheckpointError
from cornplug.planner.inputs.field_types import Count, InputTable, NonNegative, Positive, field_error

Json = Mapping[str, Any]
_EXPERT_KEYS: Final = ("experts", "experts_per_token")
_LLAMA: Final[Json] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_DEFAULTS: Final[Mapping[str, Json]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen2": {**_LLAMA, "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768},
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
}
"""Default values of transformers' config classes, by `model_type`. Published checkpoints with a tower omit
these values in the part of config.json for the LLM."""
_QKV_BIAS: Final = ("qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text")
_HEAD_NORM_FAMILIES: Final = ("qwen3", "gemma3")
_TIED_BY_DEFAULT: Final = ("gemma", "gemma2", "gemma3", "gemma3_text")
_EXPERT_COUNTS: Final = ("n_routed_experts", "num_experts", "num_local_experts")


class LLMShape(InputTable):
    """Size of a language model."""

    kind: Literal["llm"] = "llm"
    """Set from the component's kind."""
    layers: Count
    """`num_hidden_layers` in config.json."""
    hidden: Count
    """`hidden_size` in config.json."""
    heads: Count
    """`num_attention_heads` in config.json."""
    kv_heads: Count
    """`num_key_value_heads` in config.json."""
    head_dim: Count
    """`head_dim` in config.json, or hidden / heads."""
    parameters: Positive
    """Number of weights, including all experts."""
    active_parameters: Positive | None = None
    """Number of weights that one token passes through, by default all."""
    experts: Count | None = None
    """Routed experts per layer, needed for `dp` and `expert_parallel`."""
    experts_per_token: Count | None = None
    """`num_experts_per_tok` in config.json."""
    mla_rank: Count | None = None
    """`kv_lora_rank` + `qk_rope_head_dim` of a model with latent attention (MLA)."""
    max_context: Count = 32_768
    """Maximum tokens of a request."""
    embedding_parameters: NonNegative = 0.0
    """Number of weights in the embeddings and the output head, which are not quantised."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.kv_heads > self.heads:
            raise field_error(
                "kv_heads",
                f"{self.kv_heads} KV heads for {self.heads} heads",
                "Write at most the number of heads.",
            )
        for key in ("active_parameters", "embedding_parameters"):
            part = getattr(self, key)
            if part is not None and part > self.parameters:
                raise field_error(
                    key,
                    f"{part:g} is more than the {self.parameters:g} parameters",
                    "Write a smaller number.",
                )
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        said = (self.experts, self.experts_per_token)
        if said == (None, None):
            return self
        missing = next((k for k in ("active_parameters", *_EXPERT_KEYS) if getattr(self, k) is None), None)
        if missing is not None:
            raise field_error(
                missing, "missing, but the shape has experts", "Write all three keys of a mixture of experts."
            )
        if self.experts_per_token >= self.experts:  # type: ignore[operator]
            remedy = "Write a smaller number, or omit both keys if each token uses all experts."
            raise field_error("experts_per_token", f"{said[1]} of {said[0]} experts", remedy)
        return self

    @property
    def expert_parameters(self) -> float:
        """Number of weights in all routed experts, or 0 if the model has no experts or the number of experts
        is unknown.

        A token passes through k of E experts, so the weights that it does not use are (E - k) / E of all
        expert weights.
        """
        if self.experts is None or self.experts_per_token is None or self.active_parameters is None:
            return 0.0
        idle = self.parameters - self.active_parameters
        return idle * self.experts / (self.experts - self.experts_per_token)


def text_config(config: Json) -> Json:
    """Return the language model's part of config.json, with the defaults of its config class."""
    for name in ("text_config", "llm_config"):
        if isinstance(nested := config.get(name), Mapping):
            return {**_DEFAULTS.get(str(nested.get("model_type")), {}), **nested}
    return {**_DEFAULTS.get(str(config.get("model_type")), {}), **config}


def from_config(config: Json, counted_parameters: int | None = None) -> LLMShape:
    """Return the shape that config.json describes. `counted_parameters` is the number of parameters in the
    weights, or None if the weights are absent.

    Raises CheckpointError("bad_config") if config.json lacks a field that every decoder needs.
    """
    text = text_config(config)
    attention = _attention(text)
    experts = _experts(text)
    layers, hidden = _number(text, "num_hidden_layers"), _number(text, "hidden_size")
    gated = 3 * hidden
    dense_mlp = gated * _number(text, "intermediate_size") if experts.layers < layers else 0
    norms = hidden * (4 if _is_family(text, ("gemma2", "gemma3")) else 2)
    embeddings = _number(text, "vocab_size") * hidden * (1 if _ties_embeddings(config, text) else 2)
    total = (
        embeddings
        + layers * (attention.parameters + norms)
        + (layers - experts.layers) * dense_mlp
        + experts.layers
        * (
            experts.router_parameters
            + experts.shared_parameters
            + experts.per_layer * experts.expert_parameters
        )
        + hidden
    )
    idle = experts.layers * (experts.per_layer - experts.per_token) * experts.expert_parameters
    parameters = counted_parameters or total
    return LLMShape(
        layers=layers,
        hidden=hidden,
        heads=_number(text, "num_attention_heads"),
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        parameters=parameters,
        active_parameters=parameters - idle if idle else None,
        experts=experts.per_layer if idle else None,
        experts_per_token=experts.per_token if idle else None,
        mla_rank=attention.mla_rank,
        max_context=int(text.get("max_position_embeddings") or 32768),
        embedding_parameters=embeddings,
    )


@dataclass(frozen=True)
class _AttentionShape:
    parameters: int
    """Number of weights per layer."""
    kv_heads: int
    head_dim: int
    mla_rank: int | None = None


def _attention(text: Json) -> _AttentionShape:
    hidden, heads = _number(text, "hidden_size"), _number(text, "num_attention_heads")
    if text.get("kv_lora_rank"):
        return _latent_attention(text, hidden, heads)
    head_dim = int(text.get("head_dim") or hidden // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    q, kv = heads * head_dim, kv_heads * head_dim
    parameters = hidden * (2 * q + 2 * kv)
    if text.get("attention_bias"):
        parameters += q + 2 * kv + hidden
    elif str(text.get("model_type")) in _QKV_BIAS:
        parameters += q + 2 * kv
    if _is_family(text, _HEAD_NORM_FAMILIES):
        parameters += 2 * head_dim
    return _AttentionShape(parameters, kv_heads, head_dim)


def _latent_attention(text: Json, hidden: int, heads: int) -> _AttentionShape:
    """Return the shape of MLA (DeepSeek-V2 and V3), which computes queries, keys and values from vectors of
    low rank, and caches only a vector of size `mla_rank` for each token."""
    rank, rope = _number(text, "kv_lora_rank"), _number(text, "qk_rope_head_dim")
    nope, value = _number(text, "qk_nope_head_dim"), _number(text, "v_head_dim")
    q_rank = text.get("q_lora_rank")
    q_width = heads * (nope + rope)
    queries = hidden * q_rank + q_rank + q_rank * q_width if q_rank else hidden * q_width
    keys_values = hidden * (rank + rope) + rank + rank * heads * (nope + value)
    return _AttentionShape(queries + keys_values + heads * value * hidden, heads, nope + rope, rank + rope)


@dataclass(frozen=True)
class _Experts:
    layers: int = 0
    """Number of layers with experts."""
    per_layer: int = 0
    """Routed experts per layer."""
    per_token: int = 0
    """Number of experts that one token is routed to."""
    expert_parameters: int = 0
    """Parameters of one expert in one layer."""
    shared_parameters: int = 0
    """Parameters of the shared experts in one layer."""
    router_parameters: int = 0
    """Parameters of the router in one layer."""


def _experts(text: Json) -> _Experts:
    number = next((int(text[n]) for n in _EXPERT_COUNTS if text.get(n)), 0)
    if not number:
        return _Experts()
    hidden = _number(text, "hidden_size")
    width = int(text.get("moe_intermediate_size") or _number(text, "intermediate_size"))
    shared = int(text.get("n_shared_experts") or 0) * width * 3 * hidden
    if own := text.get("shared_expert_intermediate_size"):  # Qwen2-MoE: one shared expert, with a gate
        shared = 3 * hidden * int(own) + hidden
    layers = sum(_is_sparse(text, i) for i in range(_number(text, "num_hidden_layers")))
    return _Experts(
        layers, number, _number(text, "num_experts_per_tok"), 3 * hidden * width, shared, hidden * number
    )


def _is_sparse(text: Json, layer: int) -> bool:
    """Return whether a layer has experts, from DeepSeek's or Qwen's fields in config.json. Without these
    fields, all layers have experts (Mixtral)."""
    if layer < int(text.get("first_k_dense_replace") or 0) or layer in (text.get("mlp_only_layers") or ()):
        return False
    if "moe_layer_freq" in text:
        return layer % int(text["moe_layer_freq"]) == 0
    return (layer + 1) % int(text.get("decoder_sparse_step") or 1) == 0


def _ties_embeddings(config: Json, text: Json) -> bool:
    by_default = str(text.get("model_type")) in _TIED_BY_DEFAULT
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", by_default)))


def _is_family(text: Json, families: tuple[str, ...]) -> bool:
    return str(text.get("model_type", "")).startswith(families)


def _number(text: Json, name: str) -> int:
    value = text.get(name)
    if not isinstance(value, int) or value <= 0:
        raise CheckpointError(
            f"config.json of {text.get('model_type')!r} has no {name}. Add [shape] to the component instead.",
            reason="bad_config",
        )
    return value
