"""Near-collisions: deployments that differ from another by one small thing.

Three kinds of rule: what is drawn at random is judged by the numbers alone ("computed"); what is another
tenant's must be apart whatever the numbers say ("apart"); what only has another name must not be ("same").
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

from .deployments import LENGTH, Deployment, Tensors, random_image

Rule = Literal["computed", "apart", "same"]


@dataclass(frozen=True)
class Case:
    """Two deployments, and what is expected of their keys."""

    kind: str
    rule: Rule
    of: Deployment
    """The one to compare with."""
    changed: Deployment
    what: str
    """For messages: what was changed."""


Make = Callable[[Deployment, random.Random], tuple[Deployment, Deployment, str]]
_Path = tuple[str | int, ...]

_WORDS: Final = {
    "hidden_act": ("gelu", "relu", "silu", "quick_gelu", "gelu_pytorch_tanh"),
    "projector_hidden_act": ("gelu", "relu", "silu"),
    "vision_feature_select_strategy": ("default", "full"),
    "rope_type": ("default", "linear", "dynamic", "yarn", "longrope", "llama3"),
    "type": ("default", "linear", "mrope"),
    "dtype": ("float32", "bfloat16", "float16"),
    "torch_dtype": ("float32", "bfloat16", "float16"),
    "_attn_implementation": ("eager", "sdpa"),
}


# -- values of JSON ------------------------------------------------------------------------------


def leaves(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Every leaf of a JSON value, with its path. Empty containers are leaves."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not value or not inner:
        yield path, value
        return
    for key, each in inner:
        yield from leaves(each, (*path, key))


def with_leaf(value: Any, path: _Path, leaf: Any) -> Any:
    """A JSON value with one leaf set, added where it is not there."""
    if not path:
        return leaf
    key, *rest = path
    if isinstance(value, list):
        return [with_leaf(each, tuple(rest), leaf) if i == key else each for i, each in enumerate(value)]
    known = value if isinstance(value, dict) else {}
    return {**known, key: with_leaf(known.get(key), tuple(rest), leaf)}


def _nested(path: _Path, leaf: Any) -> dict[str, Any]:
    return dict(with_leaf({}, path, leaf))


def another(value: Any, name: str, rng: random.Random) -> Any:
    """A value that could stand in its place."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, value * 2, max(1, value // 2), 0, 7])
    if isinstance(value, float):
        return rng.choice([value * 1.5, value + 0.125, value * (1 + 1e-6), 0.0, -value, 1.0])
    if name in _WORDS:
        return rng.choice([word for word in _WORDS[name] if word != value])
    if isinstance(value, str):
        return value + "x"
    if value is None:
        return rng.choice([True, False, 1, 0.5, 16, "gelu"])
    return {"x": 1} if isinstance(value, dict) else [1]


def _one_of(content: dict[str, Any], whole: dict[str, Any], rng: random.Random) -> tuple[_Path, Any]:
    """A leaf that is written, or one that the class has by default, and another value for it."""
    written = list(leaves(content))
    known = dict(written)
    unwritten = [(path, value) for path, value in leaves(whole) if path and path not in known]
    path, value = rng.choice(unwritten if unwritten and rng.random() < 0.4 else written)
    return path, another(value, str(path[-1]), rng)


def _class_config(deployment: Deployment) -> dict[str, Any]:
    """config.json with every field that the class has."""
    return _whole_config(deployment.family, json.dumps(deployment.config))


@functools.cache
def _whole_config(family: str, config: str) -> dict[str, Any]:
    made = CONFIG_MAPPING[family](**json.loads(config))
    return dict(json.loads(made.to_json_string(use_diff=False)))


def _class_processor(deployment: Deployment) -> dict[str, Any]:
    """preprocessor_config.json with every field that the class has."""
    return _whole_processor(json.dumps(deployment.preprocessor))


@functools.cache
def _whole_processor(preprocessor: str) -> dict[str, Any]:
    given = json.loads(preprocessor)
    kind = get_image_processor_class_from_name(given["image_processor_type"])
    return dict(json.loads(json.dumps(kind(**given).to_dict(), default=str)))


# -- what is drawn at random ----------------------------------------------------------------------


def weight_bit(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    name = rng.choice(list(of.tensors))
    tensor = of.tensors[name].clone()
    at, bit = rng.randrange(tensor.numel()), rng.randrange(31)
    tensor.view(-1).view(torch.int32)[at] ^= 1 << bit
    return of, of.but(tensors={**of.tensors, name: tensor}), f"bit {bit} of {name}[{at}]"


def weight_swap(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    """Two tensors of one shape change places: all bytes are there, under other names."""
    name = rng.choice(list(of.tensors))
    tensor = of.tensors[name]
    twins = [other for other, t in of.tensors.items() if t.shape == tensor.shape and other != name]
    other = rng.choice(twins or [name])
    swapped = {**of.tensors, name: of.tensors[other], other: tensor}
    return of, of.but(tensors=swapped), f"{name} and {other} changed places"


def weight_rows(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    """Rows of one tensor change places."""
    name = rng.choice([name for name, t in of.tensors.items() if len(t) > 1])
    tensor = of.tensors[name].clone()
    one, two = rng.sample(range(len(tensor)), 2)
    tensor[[one, two]] = tensor[[two, one]]
    return of, of.but(tensors={**of.tensors, name: tensor}), f"rows {one} and {two} of {name}"


def config_value(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    path, value = _one_of(of.config, _class_config(of), rng)
    return of, of.but(config=with_leaf(of.config, path, value)), f"config.json {path} = {value!r}"


def config_absent(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    path, value = rng.choice(list(leaves(of.config)))
    inner: Any = {**of.config}
    where = inner
    for key in path[:-1]:
        where[key] = where[key].copy()
        where = where[key]
    if isinstance(where, dict):
        del where[path[-1]]
    else:
        where.pop(path[-1])
    return of, of.but(config=inner), f"config.json without {path}, which is {value!r}"


def preprocessor_value(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    path, value = _one_of(of.preprocessor, _class_processor(of), rng)
    made = with_leaf(of.preprocessor, path, value)
    return of, of.but(preprocessor=made), f"preprocessor_config.json {path} = {value!r}"


def _argument(of: Deployment, rng: random.Random) -> tuple[dict[str, Any], str]:
    path, value = _one_of(_class_processor(of), {}, rng)
    if len(path) > 1:  # transformers takes whole arguments
        whole = with_leaf(_class_processor(of)[str(path[0])], path[1:], value)
        return {str(path[0]): whole}, f"{path} = {value!r}"
    return {str(path[0]): value}, f"{path} = {value!r}"


def processor_argument(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    given, what = _argument(of, rng)
    return of, of.but(processor_kwargs=given), f"--mm-processor-kwargs {what}"


def request_argument(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    given, what = _argument(of, rng)
    return of, of.but(options=given), f"mm_processor_kwargs of the request {what}"


def hf_override(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    paths = [(p, v) for p, v in leaves(_class_config(of)) if not any(isinstance(key, int) for key in p)]
    path, old = rng.choice(paths)
    value = another(old, str(path[-1]), rng)
    return of, of.but(hf_overrides=_nested(path, value)), f"--hf-overrides {path} = {value!r}"


def dtype(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    name = rng.choice(["bfloat16", "float16"])
    return of, of.but(dtype=name), f"--dtype {name}"


def max_model_len(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    """Of a language model whose rotary embedding follows it, and of one whose does not."""
    if rng.random() < 0.7 and "text_config" in of.config:
        text = of.config["text_config"]
        half = text["hidden_size"] // text["num_attention_heads"] // 2
        kind = rng.choice(["su", "longrope", "longrope"])
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "short_factor": [1.0] * half,
            "long_factor": [1.0 + 0.5 * i for i in range(half)],
            "original_max_position_embeddings": 1024,
            "factor": 4.0,
        }
        if kind == "su":
            scaling |= {"type": "su"}
        fields = {"rope_scaling": scaling, "original_max_position_embeddings": 1024}
        of = of.but(config={**of.config, "text_config": {**text, **fields}})
    length = rng.choice([512, 1024, 1025, 2048, 8192])
    return of, of.but(max_model_len=length), f"--max-model-len {length}, not {of.max_model_len}"


def image(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    made = of.image.copy()
    at = rng.randrange(made.width), rng.randrange(made.height)
    red, *others = made.getpixel(at)  # type: ignore[misc]
    made.putpixel(at, (red ^ 1 << rng.randrange(8), *others))
    uuid = "the-same" if rng.random() < 0.5 else None
    return of.but(uuid=uuid), of.but(image=made, uuid=uuid), f"one level of the pixel at {at}"


def image_size(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    made = random_image(0, *rng.choice([(61, 67), (66, 61), (67, 62), (40, 100)]))
    return of, of.but(image=made), f"an image of {made.size}"


def token(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    tokens = list(of.tokens)
    at = rng.randrange(LENGTH)
    if rng.random() < 0.5:
        tokens[at] = tokens[at] + 1
    else:
        tokens[at], tokens[at - 1] = tokens[at - 1], tokens[at]
    return of, of.but(tokens=tuple(tokens)), f"token {at}"


# -- adapters ---------------------------------------------------------------------------------------


def _adapted(of: Deployment) -> Deployment:
    generator = torch.Generator().manual_seed(7)
    tensors: Tensors = {}
    names = [n for n in of.tensors if n.endswith(("q_proj.weight", "v_proj.weight")) and "vision" not in n]
    for name in names:
        rows, columns = of.tensors[name].shape
        stem = "base_model.model." + name.removesuffix(".weight")
        tensors[f"{stem}.lora_A.weight"] = torch.randn(4, columns, generator=generator)
        tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, 4, generator=generator)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return of.but(adapter=(tensors, config))


def adapter(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    with_it = _adapted(of)
    assert with_it.adapter is not None
    tensors, config = with_it.adapter
    draw = rng.random()
    if draw < 0.1:
        return of, with_it, "an adapter"
    if draw < 0.25:
        alpha = rng.choice([4, 7, 16])
        return with_it, of.but(adapter=(tensors, {**config, "lora_alpha": alpha})), f"lora_alpha {alpha}"
    name = rng.choice(list(tensors))
    made = tensors[name].clone()
    at, bit = rng.randrange(made.numel()), rng.randrange(31)
    made.view(-1).view(torch.int32)[at] ^= 1 << bit
    return with_it, of.but(adapter=({**tensors, name: made}, config)), f"bit {bit} of {name}[{at}]"


# -- what must be apart ------------------------------------------------------------------------------


def salt(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    one, two = rng.sample([None, "", "a", "b", "None", "a ", "A", "\x00", "\x01a", "ab"], 2)
    return of.but(salt=one), of.but(salt=two), f"salt {two!r}, not {one!r}"


# -- what is another name only ------------------------------------------------------------------------


_GENERATIONS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    # (as published, as transformers 4.52 and later write it); the first that fits counts.
    "llava": (
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ),
    "qwen2_vl": (("visual.", "model.visual."), ("model.", "model.language_model.")),
    "qwen3_vl": (),
}


def renamed(family: str, name: str) -> str:
    """A tensor's name in the other generation."""
    for old, new in _GENERATIONS[family]:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def tensor_names(of: Deployment, _rng: random.Random) -> tuple[Deployment, Deployment, str]:
    return of, of.but(rename=lambda name: renamed(of.family, name)), "tensor names of another generation"


def resharded(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    names = list(of.tensors)
    rng.shuffle(names)
    count = rng.choice([1, 2, 4, 7])
    shards = tuple(tuple(names[i::count]) for i in range(count))
    return of, of.but(shards=shards), f"{count} files"


def resaved(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    metadata = {"format": "pt", "saved_by": "x" * rng.randrange(1, 9)}
    tensors = {name: tensor.clone() for name, tensor in of.tensors.items()}
    return of, of.but(metadata=metadata, tensors=tensors), "another header of the files"


def directory(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    """Another path, or another revision with equal content."""
    name = rng.choice(["other", "snapshots/0123abcd", "with space", "llava-v1.6"])
    more = {"README.md": "x", "generation_config.json": json.dumps({"temperature": 0.7})}
    return of, of.but(folder=name, more_files=more), f"folder {name!r} and files beside"


def uuid(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    one, two = rng.sample([None, "a", "b", "cp1-" + "0" * 64], 2)
    return of.but(uuid=one), of.but(uuid=two), f"uuid {two!r}, not {one!r}"


def spelled(of: Deployment, rng: random.Random) -> tuple[Deployment, Deployment, str]:
    """The same config with its fields in another order, and fields that no forward pass reads."""
    fields = list(of.config.items())
    rng.shuffle(fields)
    config = dict(fields)
    config["_name_or_path"] = f"org/{rng.randrange(99)}"
    config["transformers_version"] = rng.choice(["4.40.0", "5.0.0"])
    if "torch_dtype" in config and rng.random() < 0.5:
        config["dtype"] = config.pop("torch_dtype")
    return of, of.but(config=config, indent=rng.choice([None, 4])), "config.json written otherwise"


KINDS: Final[dict[str, tuple[Rule, int, Make]]] = {
    "bit of a weight": ("computed", 460, weight_bit),
    "tensors change places": ("computed", 60, weight_swap),
    "rows change places": ("computed", 60, weight_rows),
    "value in config.json": ("computed", 400, config_value),
    "field gone from config.json": ("computed", 70, config_absent),
    "value in preprocessor": ("computed", 220, preprocessor_value),
    "processor argument": ("computed", 110, processor_argument),
    "argument of a request": ("computed", 70, request_argument),
    "hf override": ("computed", 130, hf_override),
    "dtype": ("computed", 10, dtype),
    "longest sequence": ("computed", 30, max_model_len),
    "adapter": ("computed", 90, adapter),
    "pixel": ("computed", 60, image),
    # The kind seeds its draws: another name would draw other cases.
    "size of picture": ("computed", 10, image_size),
    "token": ("computed", 40, token),
    "salt": ("apart", 40, salt),
    "tensor names": ("same", 10, tensor_names),
    "files of tensors": ("same", 40, resharded),
    "header of files": ("same", 20, resaved),
    "folder, revision": ("same", 20, directory),
    "uuid": ("same", 20, uuid),
    "spelling of config.json": ("same", 30, spelled),
}
"""kind -> (rule, how many of 2,000 cases, generator)"""
