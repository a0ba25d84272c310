from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import Modality, MultimodalProcessorOutput
from sglang.srt.multimodal.media_artifacts.base import MediaArtifactCacheMixin
from sglang.srt.utils import ImageData
from time_limits import TimeLimits

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.formats.image import digest_image, to_engine_rgb
from cornplug.engine_common import weights_guard
from cornplug.engine_common.model_identity import EngineModel, TowerIdentity
from cornplug.engine_common.shared_flags import load_settings
from cornplug.errors import CheckpointError
from cornplug.identity import embedding_key, media_item_lineage, placeholder_tokens
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import validated_families
from cornplug.sglang_hooks.media import media_digests, mm_identifiers
from cornplug.sglang_hooks.media.mm_identifiers import Towers
from cornplug.sglang_hooks.media.placeholder_tokens import key_of
from cornplug.store.memory import MemoryStore

from ..hooked import hook_of
from ..media_rig import SECRET, TOWER, item, runtime, sample_image

finalize_mm_items = hook_of(media_digests, "BaseMultimodalProcessor._finalize_mm_items")
compose_artifacts = hook_of(media_digests, "QwenVLImageProcessor.compose_image_artifacts")
build_artifacts = hook_of(media_digests, "MediaArtifactCacheMixin._run_preprocess_and_build_artifact_batch")
llava_request = hook_of(media_digests, "LlavaImageProcessor.process_mm_data_async")
llava_image = hook_of(media_digests, "LlavaImageProcessor._process_single_image")
tokenize_one_request = hook_of(mm_identifiers, "TokenizerManager._tokenize_one_request")

TOWERS = Towers(TowerIdentity(TOWER, TOWER))
PROCESSOR = SimpleNamespace(_processor=SimpleNamespace(image_processor=SimpleNamespace(do_convert_rgb=True)))


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    here = runtime(MemoryStore(capacity_bytes=1 << 20).connect())
    monkeypatch.setattr(activation, "is_on", lambda: True)
    monkeypatch.setattr(activation, "runtime", lambda: here)


def request(**fields: Any) -> GenerateReqInput:
    return GenerateReqInput(text="x", image_data=fields.pop("image_data", ["a"]), **fields)


# -- digests ---------------------------------------------------------------------------------


def test_media_digests_of_image_equal_vllm_and_encoder() -> None:
    assert media_digests.image_digest(sample_image(1)) == digest_image(sample_image(1))
    grey = sample_image(1, mode="L")
    assert media_digests.image_digest(grey) == digest_image(to_engine_rgb(grey))
    assert media_digests.image_digest(sample_image(1)) != media_digests.image_digest(sample_image(2))


def test_media_digests_of_transparent_image_differ_from_vllm() -> None:
    clear = sample_image(1, mode="RGBA")
    assert media_digests.image_digest(clear) == media_digests.image_digest(clear.convert("RGB"))
    assert media_digests.image_digest(clear) == digest_image(to_engine_rgb(clear, "sglang-0.5.23"))
    assert media_digests.image_digest(clear) != digest_image(to_engine_rgb(clear))


def test_media_digests_ignore_exif_orientation() -> None:
    turned = sample_image(1)
    turned.getexif()[0x0112] = 6
    assert media_digests.image_digest(turned) == digest_image(sample_image(1))
    assert media_digests.image_digest(turned) != digest_image(to_engine_rgb(turned))


def test_media_digests_of_other_objects_are_none() -> None:
    assert media_digests.image_digest(sample_image(1, mode="L"), converts=False) is None
    assert media_digests.image_digest(torch.zeros(3, 4, 4)) is None
    assert media_digests.image_digest("a") is None


def test_media_digests_of_gpu_pixels_differ() -> None:
    pixels = torch.zeros(3, 4, 4, dtype=torch.uint8)
    assert media_digests.image_digest(pixels) not in (
        None,
        media_digests.image_digest(sample_image(0, (4, 4))),
    )


def test_media_digests_are_not_serialised() -> None:
    one = item()
    media_digests.set_digest(one, b"d" * 32)
    assert media_digests.digest_of(one) == b"d" * 32
    assert b"d" * 32 not in msgspec.msgpack.encode(one, enc_hook=lambda _: None)
    assert "_cornplug_media" not in one.model_specific_data


def finalize(items: list[Any], images: list[Any]) -> list[bytes | None]:
    made = finalize_mm_items(lambda this, items, images: items, PROCESSOR, items, images=images)
    return [media_digests.digest_of(one) for one in made]


@pytest.mark.parametrize("way", ["items", "artifacts"])
def test_media_digests_are_made_off_event_loop(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A large one takes a tenth of a second, in which every stream of the server would stand still."""
    seen: list[threading.Thread] = []
    digest = media_digests.image_digest

    def digested(image: object, *, converts: bool = True) -> bytes | None:
        seen.append(threading.current_thread())
        return digest(image, converts=converts)

    monkeypatch.setattr(media_digests, "image_digest", digested)

    async def build(this: Any, entries: Any) -> Any:
        return [SimpleNamespace(artifact_key="k")]

    async def loop() -> None:
        if way == "artifacts":
            await build_artifacts(build, PROCESSOR, [SimpleNamespace(media=sample_image(1))])
            return
        items = finalize_mm_items(
            lambda this, items, images: items, PROCESSOR, [item()], images=[sample_image(1)]
        )
        await media_digests.compute_digests(items)
        assert media_digests.digest_of(items[0]) == digest_image(sample_image(1))

    asyncio.run(loop())
    assert len(seen) == 1
    assert seen[0] is not threading.current_thread()


def test_media_digests_pair_items_with_images() -> None:
    video = item(modality=Modality.VIDEO)
    found = finalize([item(), video, item()], [sample_image(1), sample_image(2)])
    assert found == [digest_image(sample_image(1)), None, digest_image(sample_image(2))]


@pytest.mark.parametrize(
    "images", [[sample_image(1), sample_image(2)], [{"format": "processor_output", "feature": None}]]
)
def test_media_digests_of_unpaired_items_are_none(images: list[Any]) -> None:
    assert finalize([item()], images) == [None]


def test_media_digests_of_cached_artifacts_are_kept() -> None:
    entries = [SimpleNamespace(media=sample_image(i), artifact_key=f"k{i}") for i in (1, 2)]

    async def build(this: Any, entries: Any) -> Any:
        return [SimpleNamespace(artifact_key=entry.artifact_key) for entry in entries]

    made = asyncio.run(build_artifacts(build, PROCESSOR, entries))
    # A later request finds both in SGLang's cache, one of them twice, and one that we never saw.
    unknown = SimpleNamespace(artifact_key="k9")
    output = SimpleNamespace(mm_items=[item() for _ in range(4)])
    compose_artifacts(output, PROCESSOR, "", [made[1], made[0], made[1], unknown])
    one, two = digest_image(sample_image(1)), digest_image(sample_image(2))
    assert [media_digests.digest_of(i) for i in output.mm_items] == [two, one, two, None]


def test_media_digests_of_llava_depend_on_aspect_mode() -> None:
    processor = SimpleNamespace(hf_config=SimpleNamespace(image_aspect_ratio=None))
    digests = {"a": b"a" * 32, "b": b"b" * 32}

    async def one(this: Any, data: Any, aspect: Any, grid: Any) -> Any:
        await asyncio.sleep(0.02 if data == "a" else 0)  # ends after the second
        return "pixels", digests.get(data), (1, 1)

    async def several(this: Any, images: Any, *args: Any) -> Any:
        aspect = "pad" if len(images) > 1 else None
        await asyncio.gather(*(llava_image(one, this, i, aspect, None) for i in images))
        return SimpleNamespace(mm_items=[item() for _ in images])

    async def run(images: list[str]) -> list[bytes | None]:
        output = await llava_request(several, processor, images)
        return [media_digests.digest_of(i) for i in output.mm_items]

    assert asyncio.run(run(["a"])) == [b"a" * 32]
    padded = asyncio.run(run(["a", "b", "c"]))
    assert padded[2] is None
    # Another aspect ratio is another processing.
    # None, the two plain digests, and two others.
    assert len({*padded, b"a" * 32, b"b" * 32}) == 5


# -- names -----------------------------------------------------------------------------------


def named(items: list[Any], obj: Any, **fields: Any) -> MultimodalProcessorOutput:
    made = MultimodalProcessorOutput(mm_items=items, **fields)
    mm_identifiers.assign_keys(made, TOWERS, obj)
    return made


def with_digest(seed: int = 1, **fields: Any) -> Any:
    one = item(seed, **fields)
    media_digests.set_digest(one, digest_image(sample_image(seed)))
    return one


def test_mm_identifiers_key_fills_placeholder_tokens() -> None:
    first, second, video = (
        with_digest(1, start=2),
        with_digest(2, start=7),
        item(modality=Modality.VIDEO, start=12),
    )
    for one in (first, second, video):
        one.set_hash(77)
    before = list(range(16))
    made = named(
        [first, second, video], request(image_data=["a", "b"]), input_ids=before, padded_input_ids=before[:]
    )
    key = embedding_key(SECRET, TOWER, digest_image(sample_image(1)), None)
    assert key_of(first) == key
    assert made.padded_input_ids is not None
    assert made.padded_input_ids[2:6] == list(placeholder_tokens(media_item_lineage(key, 4)))
    assert made.padded_input_ids[7:11] == list(placeholder_tokens(second.identity))
    assert key_of(second) == embedding_key(SECRET, TOWER, digest_image(sample_image(2)), None)
    assert made.padded_input_ids[12:] == before[12:]
    assert video.identity is None


@pytest.mark.parametrize(
    ("fields", "salt"),
    [
        ({"cache_salt": "s"}, "s"),
        ({"extra_key": "e"}, "\x00extra-key:1:e"),
        ({"cache_salt": "s", "extra_key": "e"}, "\x00salt:1:sextra-key:1:e"),
    ],
)
def test_mm_identifiers_key_contains_salt_and_extra_key(fields: dict[str, str], salt: str) -> None:
    one = with_digest()
    named([one], request(**fields))
    assert key_of(one) == embedding_key(SECRET, TOWER, digest_image(sample_image(1)), salt)


def test_mm_identifiers_client_hashes_give_no_key() -> None:
    ours, theirs = with_digest(), item()
    ours.set_hash(0xC11E47)
    # Fields of a client's own processor output end up so.
    theirs.set("identity", b"forged".ljust(32))
    theirs.set("cornplug_key", b"forged".ljust(32))
    named([ours, theirs], request(image_data=["a", "b"], mm_hashes=["c11e47", "c11e47"]))
    assert key_of(ours) == embedding_key(SECRET, TOWER, digest_image(sample_image(1)), None)
    assert theirs.identity is None


def test_sglang_believes_content_hash_of_read_bytes_only() -> None:
    """`media_digests` keeps digests of pixels by SGLang's key of an image.

    With --trust-mm-content-hashes the key is made of a client's hash. SGLang compares the hash with the bytes
    before it uses them.
    """

    class Door(MediaArtifactCacheMixin):
        artifact_modality = Modality.IMAGE
        trust_mm_content_hashes = True
        processor_fingerprint = f"sha256:{'0' * 64}"
        mm_preprocess_cache = SimpleNamespace(get_if_present=lambda *args, **kwargs: None)

    door: Any = Door()
    with ThreadPoolExecutor(1) as door.io_executor, pytest.raises(ValueError, match="content hash mismatch"):
        asyncio.run(door.prepare_media_artifacts([sample_image(1)], content_hashes=[f"sha256:{'1' * 64}"]))


def test_mm_identifiers_without_identity_give_no_key() -> None:
    one = with_digest()
    assert mm_identifiers.assign_keys(MultimodalProcessorOutput(mm_items=[one]), Towers(), request()) == []
    assert one.identity is None


def test_mm_identifiers_item_without_offsets_gets_no_key() -> None:
    """Nobody can say how many rows its KV would be computed from."""
    nowhere, here = with_digest(1), with_digest(2)
    nowhere.offsets = None
    made = MultimodalProcessorOutput(mm_items=[nowhere, here])
    assert mm_identifiers.assign_keys(made, TOWERS, request(image_data=["a", "b"])) == [here]
    assert key_of(nowhere) is None
    assert nowhere.identity is None


def test_mm_identifiers_processor_args_change_key() -> None:
    keys = set()
    for fields in (
        {},
        {"image_data": [ImageData(url="a", detail="low")]},
        {"image_data": [ImageData(url="a", max_dynamic_patch=4)]},
        {"mm_processor_kwargs": {"min_pixels": 4}},
        {"image_max_dynamic_patch": 2},
        {"max_dynamic_patch": 2},
        {"images_config": {"mode": "base"}},
    ):
        one = with_digest()
        named([one], request(**fields))
        keys.add(key_of(one))
    assert len(keys) == 7
    assert None not in keys
    plain = with_digest()
    named([plain], request(image_data=[ImageData(url="a", detail="auto")]))
    assert key_of(plain) in keys


def test_mm_identifiers_noncanonical_args_get_no_key() -> None:
    odd = with_digest()
    named([odd], request(mm_processor_kwargs={"x": float("nan")}))
    assert odd.identity is None
    bundled = with_digest()
    named([bundled], request(image_data=["a", ImageData(url="b", detail="low")]))
    assert bundled.identity is None


@pytest.mark.parametrize("family", ["glm4v_moe", "mistral3", "gemma3", "llava_next", "nobody_knows"])
def test_tower_identity_of_unvalidated_family_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    described = EngineModel(
        checkpoint=Checkpoint.open(str(tmp_path)),
        dtype="float32",
        max_model_len=64,
        engine="sglang",
        validated_families=validated_families("float32"),
    )
    monkeypatch.setattr(mm_identifiers, "engine_model", lambda: described)
    with pytest.raises(CheckpointError, match="has not been tested") as caught:
        mm_identifiers._tower_identity(None)
    assert caught.value.reason == "unproven_family"


def test_media_identifiers_slow_checkpoint_waits_once(
    monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    read = threading.Event()
    monkeypatch.setattr(mm_identifiers, "_identify", lambda processor: read.wait(60) and TOWERS)
    monkeypatch.setattr(weights_guard, "INITIAL_WAIT_S", 3.0)
    names = mm_identifiers.MediaIdentifiers(None)

    async def requests() -> list[float]:
        waited = []
        for _ in range(2):
            began = time.monotonic()
            assert (await names.towers())[1] == Towers()
            waited.append(time.monotonic() - began)
        return waited

    first, second = asyncio.run(requests())
    read.set()
    assert first >= 2.9
    within.check(second, 2.5, "the second request does not wait again")


@pytest.mark.parametrize("nnodes", [1, 2])
def test_mm_identifiers_on_two_hosts_prefetch_nothing(monkeypatch: pytest.MonkeyPatch, nnodes: int) -> None:
    """The other host's store has none of it, so all ranks would encode what the service had encoded."""
    asked: list[Any] = []

    class Prefetcher:
        def __init__(self, *args: Any) -> None:
            """Nobody to connect to."""

        async def prepare(self, items: list[Any], *args: Any) -> None:
            asked.extend(items)

    monkeypatch.setattr(mm_identifiers, "EmbeddingPrefetcher", Prefetcher)
    monkeypatch.setattr(mm_identifiers, "_identify", lambda processor: TOWERS)
    monkeypatch.setattr(activation, "tally", lambda: None)
    monkeypatch.setattr(activation, "config", lambda: load_settings({}))
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: SimpleNamespace(nnodes=nnodes))
    one = item()
    media_digests.set_digest(one, digest_image(sample_image(1)))
    one.precomputed_embeddings = None
    tokenized = SimpleNamespace(mm_inputs=MultimodalProcessorOutput(mm_items=[one], input_ids=[1]))

    async def original(manager: Any, obj: Any) -> Any:
        return tokenized

    manager = SimpleNamespace(mm_processor=object())
    asyncio.run(tokenize_one_request(original, manager, request()))
    assert one.identity is not None  # named all the same: its KV is
    assert len(asked) == (1 if nnodes == 1 else 0)
