"""Tiny checkpoints are reproducible, share parts by seed, and give answers that depend on the image."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.checkpoints.safetensors_digest import read_header
from devkit import checkpoints

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


@pytest.mark.parametrize("make", [make for make, _ in ARCHITECTURES.values()], ids=list(ARCHITECTURES))
def test_tiny_same_seeds_give_same_files(tmp_path: Path, make: Callable[..., Path]) -> None:
    seen = []
    for name in ("one", "two"):
        folder = make(tmp_path / name)
        seen.append({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()})
    assert seen[0] == seen[1]
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= seen[0].keys()


def test_tiny_pair_shares_one_tower(folders: dict[str, Path], tmp_path: Path) -> None:
    other = checkpoints.llava(tmp_path / "x", hidden_size=128, layers=3, heads=4, kv_heads=1, llm_seed=9)
    assert _tower_bytes(other) == _tower_bytes(folders["llava"]) != {}
    ours, theirs = _fingerprints(folders["llava"]), _fingerprints(other)
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [True, False, False]
    assert Checkpoint.open(str(other)).tower_spec("float32") == Checkpoint.open(
        str(folders["llava"])
    ).tower_spec("float32")


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_tiny_greedy_answers_depend_on_the_image(folders: dict[str, Path], family: str) -> None:
    model = _model(folders[family], family)
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


def _model(folder: Path, family: str) -> Any:
    cls = getattr(transformers, ARCHITECTURES[family][1])
    return cls.from_pretrained(folder).eval()


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
