"""Tiny checkpoints: published form, seeded parts, and models that say something of their own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.checkpoints.safetensors_digest import read_header
from devkit import checkpoints, tokenizers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

NEW_TOKENS = 32
ARCHITECTURES: dict[str, tuple[Callable[..., Path], str]] = {
    "llava": (checkpoints.llava, "LlavaForConditionalGeneration"),
    "qwen2_vl": (checkpoints.qwen2_vl, "Qwen2VLForConditionalGeneration"),
    "qwen2_5_vl": (checkpoints.qwen2_5_vl, "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": (checkpoints.qwen3_vl, "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": (checkpoints.qwen3_vl_moe, "Qwen3VLMoeForConditionalGeneration"),
    "qwen2": (checkpoints.qwen2_text, "Qwen2ForCausalLM"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(tmp_path_factory.mktemp("tiny") / name) for name, (make, _) in ARCHITECTURES.items()}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _fingerprints(path: Path) -> tuple[bytes, bytes, bytes]:
    checkpoint = Checkpoint.open(str(path))
    return (
        checkpoint.fingerprint("tower"),
        checkpoint.fingerprint("projector"),
        checkpoint.fingerprint("language_model"),
    )


def _tower_bytes(path: Path) -> dict[str, bytes]:
    file = path / "model.safetensors"
    content = file.read_bytes()
    return {
        name: content[e.offset : e.offset + e.size_bytes]
        for name, e in read_header(file).items()
        if name.startswith("vision_tower.")
    }


# --- seeds ---


@pytest.mark.parametrize("make", [make for make, _ in ARCHITECTURES.values()], ids=list(ARCHITECTURES))
def test_devkit_checkpoints_same_seeds_give_same_files(tmp_path: Path, make: Callable[..., Path]) -> None:
    seen = []
    for name in ("one", "two"):
        folder = make(tmp_path / name)
        seen.append({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()})
    assert seen[0] == seen[1]
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= seen[0].keys()


def test_devkit_checkpoints_pair_shares_one_tower(folders: dict[str, Path], tmp_path: Path) -> None:
    other = checkpoints.llava(tmp_path / "x", hidden_size=128, layers=3, heads=4, kv_heads=1, llm_seed=9)
    assert _tower_bytes(other) == _tower_bytes(folders["llava"]) != {}
    ours, theirs = _fingerprints(folders["llava"]), _fingerprints(other)
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [True, False, False]
    assert Checkpoint.open(str(other)).tower_spec("float32") == Checkpoint.open(
        str(folders["llava"])
    ).tower_spec("float32")


@pytest.mark.parametrize(
    ("seeds", "kept"),
    [
        ({"tower_seed": 5}, [False, True, True]),
        ({"llm_seed": 5}, [True, False, False]),
        ({"llm_seed": 5, "projector_seed": 1}, [True, True, False]),
        ({"projector_seed": 5}, [True, False, True]),
    ],
)
def test_devkit_checkpoints_each_seed_changes_its_part(
    folders: dict[str, Path], tmp_path: Path, seeds: dict[str, int], kept: list[bool]
) -> None:
    ours, theirs = _fingerprints(folders["llava"]), _fingerprints(checkpoints.llava(tmp_path / "x", **seeds))
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == kept


def test_qwen2_vl_s_seeds(folders: dict[str, Path], tmp_path: Path) -> None:
    ours = _fingerprints(folders["qwen2_vl"])
    for seeds, kept in (({"tower_seed": 5}, [True, False, False]), ({"llm_seed": 5}, [False, True, True])):
        theirs = _fingerprints(checkpoints.qwen2_vl(tmp_path / str(seeds), **seeds))
        assert [a != b for a, b in zip(ours, theirs, strict=True)] == kept


# --- form ---


def test_names_are_the_published_ones(folders: dict[str, Path]) -> None:
    wanted = {
        "llava": {
            "vision_tower.vision_model.embeddings.patch_embedding.weight",
            "multi_modal_projector.linear_1.weight",
            "language_model.model.layers.0.self_attn.q_proj.weight",
            "language_model.lm_head.weight",
        },
        "qwen2_vl": {
            "visual.blocks.0.attn.qkv.weight",
            "visual.merger.mlp.0.weight",
            "model.norm.weight",
            "lm_head.weight",
        },
        "qwen2": {"model.layers.1.mlp.up_proj.weight", "lm_head.weight"},
    }
    for family, names in wanted.items():
        assert names <= read_header(folders[family] / "model.safetensors").keys()


@pytest.mark.parametrize("family", list(ARCHITECTURES))
def test_transformers_finds_every_tensor(folders: dict[str, Path], family: str) -> None:
    model, loading = _model(folders[family], family)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_other_dtypes_and_towers(tmp_path: Path) -> None:
    vision = {**checkpoints.TINY_CLIP, "image_size": 28, "num_hidden_layers": 4}
    folder = checkpoints.llava(tmp_path / "x", dtype="bfloat16", vision=vision)
    assert {entry.dtype for entry in read_header(folder / "model.safetensors").values()} == {"BF16"}
    checkpoint = Checkpoint.open(str(folder))
    assert checkpoint.tower_spec("bfloat16")["tower"]["feature_layers"] == [3]
    assert checkpoint.config["image_seq_length"] == 4


def test_devkit_checkpoints_large_tower_has_published_shape() -> None:
    config = transformers.CLIPVisionConfig(**checkpoints.CLIP_L_336)
    with torch.device("meta"):
        model = transformers.CLIPVisionModel(config)
    assert sum(p.numel() for p in model.parameters()) == 303_507_456
    assert (config.image_size // config.patch_size) ** 2 == 576


# --- tokenizer ---


def test_devkit_checkpoints_tokenizer_reads_back_its_text(folders: dict[str, Path]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["qwen2"])
    for text in ("plain words", "tabs\tand\nlines", "größer 漢字 🌽", "<|im_start|>user\nhi<|im_end|>\n"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("<|image_pad|>", add_special_tokens=False)) == 1


def test_vocabulary_is_bytes_then_pairs() -> None:
    vocab = tokenizers.vocabulary()
    assert sorted(vocab.values()) == list(range(256 + 26 * 26))
    assert vocab["A"] == ord("A")
    assert vocab["ab"] == 257


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_devkit_checkpoints_chat_template_places_the_image(folders: dict[str, Path], family: str) -> None:
    inputs = _inputs(folders[family], family, _picture(0))
    image_token = json.loads((folders[family] / "config.json").read_text())
    wanted = image_token.get("image_token_index", image_token.get("image_token_id"))
    rows = int((inputs["input_ids"] == wanted).sum())
    assert rows == (16 if family == "llava" else int(inputs["image_grid_thw"].prod()) // 4)


# --- what the models say ---


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_devkit_checkpoints_greedy_answers_depend_on_the_image(folders: dict[str, Path], family: str) -> None:
    model, _ = _model(folders[family], family)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[family])
    answers = [_generate(model, _inputs(folders[family], family, _picture(seed))) for seed in (0, 1, 0)]
    assert answers[0] == answers[2] != answers[1]
    for answer in answers:
        assert len(answer) == NEW_TOKENS
        assert len(set(answer)) > 4
        assert not set(answer) & set(tokenizer.all_special_ids)
        text = tokenizer.decode(answer)
        assert text.isascii()
        assert text.isprintable()


def test_devkit_checkpoints_greedy_answers_depend_on_first_words(folders: dict[str, Path]) -> None:
    model, _ = _model(folders["qwen2"], "qwen2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["qwen2"])
    answers = [
        _generate(model, tokenizer(first + " and the sea and the ships" * 8, return_tensors="pt"))
        for first in ("one", "two")
    ]
    assert answers[0] != answers[1]
    assert [len(answer) for answer in answers] == [NEW_TOKENS] * 2


def _model(folder: Path, family: str) -> tuple[Any, dict[str, Any]]:
    cls = getattr(transformers, ARCHITECTURES[family][1])
    model, loading = cls.from_pretrained(folder, output_loading_info=True)
    return model.eval(), loading


def _picture(seed: int) -> Any:
    return Image.frombytes("RGB", (5, 4), hashlib.shake_256(bytes([seed])).digest(60)).resize((112, 84))


def _inputs(folder: Path, family: str, picture: Any) -> Any:
    processor = transformers.AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": "what is this?"}]
    chat = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return processor(images=[picture], text=[chat], return_tensors="pt")


def _generate(model: Any, inputs: Any) -> list[int]:
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    return list(out[0, inputs["input_ids"].shape[1] :].tolist())
