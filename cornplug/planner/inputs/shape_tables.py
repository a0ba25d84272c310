"""Sizes of components as a plan's input writes them: language models, towers, generators."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import model_validator

from cornplug.planner.inputs.field_types import Count, InputTable, NonNegative, Positive, wrong

_EXPERTS: Final = ("experts", "experts_per_token")


class LLMShape(InputTable):
    """A language model's size. A checkpoint's config.json has it, too."""

    kind: Literal["llm"] = "llm"
    """Follows from the component's kind."""
    layers: Count
    """num_hidden_layers of config.json."""
    hidden: Count
    """hidden_size of config.json."""
    heads: Count
    """num_attention_heads of config.json."""
    kv_heads: Count
    """num_key_value_heads of config.json."""
    head_dim: Count
    """Width of one head: hidden / heads where config.json does not say it."""
    parameters: Positive
    """All weights, of experts too."""
    active_parameters: Positive | None = None
    """Weights that one token passes through. Left out: all of them."""
    experts: Count | None = None
    """Routed experts of a layer (num_experts or n_routed_experts of config.json), for `dp` and
    `expert_parallel`."""
    experts_per_token: Count | None = None
    """Of them, those that a token is sent to: num_experts_per_tok of config.json."""
    mla_rank: Count | None = None
    """kv_lora_rank + qk_rope_head_dim of a model with latent attention (MLA)."""
    max_context: Count = 32_768
    """Tokens of the longest request that the model takes."""
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

    @model_validator(mode="after")
    def _experts_of_a_mixture(self) -> Self:
        said = (self.experts, self.experts_per_token)
        if said == (None, None):
            return self
        missing = next((k for k in ("active_parameters", *_EXPERTS) if getattr(self, k) is None), None)
        if missing is not None:
            raise wrong(
                missing, "it is missing beside the others of a mixture of experts", "Write all three."
            )
        if self.experts_per_token >= self.experts:  # type: ignore[operator]
            remedy = "Write fewer; a model whose tokens go to all experts has none to write."
            raise wrong("experts_per_token", f"{said[1]} of {said[0]} experts", remedy)
        return self

    @property
    def expert_parameters(self) -> float:
        """Weights of all routed experts; 0: there are none, or their number is not known.

        A token passes through k of E: the other (E - k) / E of them are those that are not active.
        """
        if self.experts is None or self.experts_per_token is None or self.active_parameters is None:
            return 0.0
        idle = self.parameters - self.active_parameters
        return idle * self.experts / (self.experts - self.experts_per_token)


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
