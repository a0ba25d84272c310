"""Names of media: made from content, never taken from a client."""

from __future__ import annotations

import io
import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from time_limits import TimeLimits
from transformers import AutoConfig
from vllm.multimodal.media.base import MediaWithBytes
from vllm.multimodal.parse import (
    ImageProcessorItems,
    MultiModalDataItems,
    MultiModalDataParser,
    MultiModalUUIDItems,
)
from vllm.multimodal.processing.inputs import ProcessorInputs

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.formats.image import digest_image
from cornplug.engine_common import engine_state, weights_guard
from cornplug.identity import embedding_key
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.media import mm_identifiers
from cornplug.vllm_connector.media.mm_identifiers import MmIdentifiers, key_of
from cornplug.vllm_connector.media.video_digest import unshared_reason
from cornplug.vllm_connector.model import model_config
from cornplug.vllm_connector.model.model_config import embedding_width, kv_identity, tower_identity
from devkit import checkpoints

from ..wrapped import wrapper_of

get_mm_hashes = wrapper_of(mm_identifiers, "BaseMultiModalProcessor._get_mm_hashes")
process_inputs = wrapper_of(mm_identifiers, "InputProcessor.process_inputs")
make_input_processor = wrapper_of(mm_identifiers, "InputProcessor.__init__")

SECRET = bytes(range(32))


def sample_image(seed: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.fixture(scope="session")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llava(tmp_path_factory.mktemp("llava") / "m")


def config(path: Path | str, **fields: Any) -> Any:
    """What our code reads of a VllmConfig."""
    model = {
        "model": str(path),
        "revision": None,
        "dtype": torch.float32,
        "hf_overrides": {},
        "quantization": None,
        "hf_config": AutoConfig.from_pretrained(path) if (path / "config.json").exists() else None,
        "max_model_len": 2048,
        "model_impl": "auto",
        "multimodal_config": object(),
        **fields,
    }
    processor_kwargs = model.pop("mm_processor_kwargs", None)
    load_format = model.pop("load_format", "auto")
    ec = model.pop("ec", "CornplugECConnector")
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format=load_format),
        kv_transfer_config=model.pop("kv", None),
        ec_transfer_config=SimpleNamespace(ec_connector=ec, ec_connector_extra_config=model.pop("extra", {})),
        model_config=SimpleNamespace(
            get_multimodal_config=lambda: SimpleNamespace(mm_processor_kwargs=processor_kwargs), **model
        ),
    )


def named(config: Any, tmp_path: Path) -> MmIdentifiers:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(SECRET)
    return MmIdentifiers(config, {"store.secret_file": str(secret)})


@pytest.fixture
def active(llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MmIdentifiers:
    one = named(config(llava, mm_processor_kwargs={"size": 56}), tmp_path)
    monkeypatch.setattr(mm_identifiers, "_active", one)
    return one


def names(
    data: dict[str, Any],
    uuids: dict[str, list[str | None]] | None = None,
    theirs: list[str] | None = None,
    **kwargs: Any,
) -> dict[str, list[str]]:
    """What `_get_mm_hashes` gives, over vLLM's own parser and hashes."""
    items = MultiModalDataParser(target_sr=16000).parse_mm_data(data)
    given = MultiModalUUIDItems(uuids) if uuids is not None else None
    inputs = ProcessorInputs([1], items, given, hf_processor_mm_kwargs=kwargs)

    def original(this: Any, inputs: ProcessorInputs) -> Any:
        return inputs.get_mm_hashes("model", "blake3")

    return get_mm_hashes(original, None, inputs)


def final(
    active: MmIdentifiers,
    mm_hash: str,
    salt: str | None = None,
    identifier: str | None = None,
    modality: str = "image",
) -> str:
    """The identifier after `process_inputs`."""
    feature = SimpleNamespace(mm_hash=mm_hash, identifier=identifier or mm_hash, modality=modality)
    request = SimpleNamespace(mm_features=[feature], cache_salt=salt)
    assert process_inputs(lambda this, request: request, None, request) is request
    return feature.identifier


def test_mm_identifiers_image_key_comes_from_pixels(active: MmIdentifiers, llava: Path) -> None:
    [name] = names({"image": sample_image(1)})["image"]
    assert name == "cp1-" + digest_image(sample_image(1)).hex()
    identity = Checkpoint.open(llava).identity("float32", processor_kwargs={"size": 56}).identity
    assert key_of(final(active, name)) == embedding_key(SECRET, identity, digest_image(sample_image(1)), None)


def test_mm_identifiers_image_format_and_exif_are_ignored(active: MmIdentifiers) -> None:
    exif = Image.Exif()
    exif[0xA420] = "11111111222222223333333344444444"  # ImageUniqueID, which vLLM takes for a name
    found = set()
    for form, extra in (("PNG", {}), ("WEBP", {"lossless": True}), ("PNG", {"exif": exif}), ("BMP", {})):
        out = io.BytesIO()
        sample_image(1).save(out, form, **extra)
        image = Image.open(io.BytesIO(out.getvalue()))
        found |= set(names({"image": MediaWithBytes(image, out.getvalue())})["image"])
        found |= set(names({"image": [image, sample_image(1)]})["image"])
    assert len(found) == 1
    out = io.BytesIO()
    sample_image(2).save(out, "PNG", exif=exif)
    assert not found & set(names({"image": Image.open(out)})["image"])


def test_mm_identifiers_image_in_another_mode_has_no_key(active: MmIdentifiers) -> None:
    """With `image_mode` null, vLLM leaves the conversion to the model's processor."""
    for mode in ("RGBA", "LA", "P", "L"):
        image = sample_image(1).convert(mode)
        [name] = names({"image": MediaWithBytes(image, b"")})["image"]
        assert not name.startswith("cp1-"), mode
    [name] = names({"image": sample_image(1).convert("RGBA")})["image"]  # vLLM itself converts it
    assert name.startswith("cp1-")


@pytest.mark.parametrize(
    "uuid", ["unshared-video_frames-x", "cp1-" + "0" * 64, "local-" + "0" * 64, "cp1-", "cp1-xyz"]
)
def test_mm_identifiers_uuid_in_key_form_becomes_foreign(active: MmIdentifiers, uuid: str) -> None:
    assert names({"image": [None]}, {"image": [uuid]}) == {"image": [f"foreign-{uuid}"]}
    audio = (np.zeros(16000, dtype=np.float32), 16000)
    assert names({"audio": [audio]}, {"audio": [uuid]}) == {"audio": [f"foreign-{uuid}"]}
    video = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    assert names({"video": [video]}, {"video": [uuid]}) == {"video": [f"foreign-{uuid}"]}
    assert key_of(final(active, f"foreign-{uuid}")) is None
    # With content the uuid counts for nothing.
    assert names({"image": [sample_image(1)]}, {"image": [uuid]}) == names({"image": sample_image(1)})


def sent(name: str, *, lora: str = "") -> SimpleNamespace:
    """The feature of a medium whose name and inputs came with a request, after `process_inputs`."""
    name = json.loads(json.dumps(name))
    feature = SimpleNamespace(mm_hash=name, identifier=lora + name, modality="image")
    request = SimpleNamespace(mm_features=[feature], cache_salt=None)
    process_inputs(lambda this, request: request, None, request)
    return feature


FORGED = (
    *("cp1-" + "0" * 64, "cp1-" + "0" * 64 + "-2", "cp1-", "cp1-zz", "local-" + "0" * 64, "cpv1-x"),
    f"cpv1-{'0' * 64}-{'1' * 64}",
    "unshared-modality-x",
)


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("identified", [True, False])
def test_mm_name_from_request_is_foreign(
    active: MmIdentifiers, monkeypatch: pytest.MonkeyPatch, name: str, identified: bool
) -> None:
    """`/inference/v1/generate` and gRPC take a client's names, and inputs that need not belong to them."""
    if not identified:
        monkeypatch.setattr(mm_identifiers, "_active", None)
        monkeypatch.setattr(mm_identifiers, "_has_connectors", True)
    for lora in ("", "7:"):
        feature = sent(name, lora=lora)
        assert key_of(feature.identifier) is None
        assert unshared_reason(feature.identifier) == "named_by_client"
        assert feature.mm_hash == f"foreign-{name}", "the engine caches processed inputs under it"
        assert feature.identifier != sent("cp1-" + "f" * 64, lora=lora).identifier


def test_mm_name_of_rendered_image_is_foreign_in_another_request(active: MmIdentifiers) -> None:
    [red] = names({"image": sample_image(1)})["image"]
    assert key_of(final(active, red)) is not None
    feature = sent(red)
    assert key_of(feature.identifier) is None
    assert feature.mm_hash != red


def test_mm_name_of_vllm_from_request_is_kept(active: MmIdentifiers) -> None:
    """A router that rendered elsewhere finds its name in KV events."""
    feature = sent("ab" * 32)
    assert (feature.mm_hash, feature.identifier) == ("ab" * 32, "ab" * 32)


def test_process_inputs_sends_plain_strings(active: MmIdentifiers) -> None:
    [name] = names({"image": sample_image(1)})["image"]
    feature = SimpleNamespace(mm_hash=name, identifier=name, modality="image")
    request = SimpleNamespace(mm_features=[feature], cache_salt=None)
    process_inputs(lambda this, request: request, None, request)
    assert feature.mm_hash == name
    assert type(feature.mm_hash) is type(feature.identifier) is str


def test_mm_identifiers_uuid_alone_names_its_last_content(active: MmIdentifiers) -> None:
    assert names({"image": [None]}, {"image": ["cat"]}) == {"image": ["cat"]}
    with_content = names({"image": [sample_image(1), sample_image(2)]}, {"image": ["cat", "dog"]})["image"]
    assert names({"image": [None, None]}, {"image": ["dog", "cat"]})["image"] == with_content[::-1]
    assert names({"image": [None]}, {"image": ["bird"]}) == {"image": ["bird"]}
    names({"image": [sample_image(3)]}, {"image": ["cat"]})
    assert names({"image": [None]}, {"image": ["cat"]}) == names({"image": sample_image(3)})


def test_mm_identifiers_uuid_takes_args_of_its_request(active: MmIdentifiers) -> None:
    names({"image": [sample_image(1)]}, {"image": ["cat"]}, size=28)
    assert names({"image": [None]}, {"image": ["cat"]}) == names({"image": sample_image(1)})
    assert names({"image": [None]}, {"image": ["cat"]}, size=28) == names({"image": sample_image(1)}, size=28)


def test_mm_identifiers_uuid_table_drops_oldest(
    active: MmIdentifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mm_identifiers, "_MAX_UUIDS", 2)
    for i, uuid in enumerate("abca"):
        names({"image": [sample_image(i)]}, {"image": [uuid]})
    assert names({"image": [None] * 2}, {"image": ["b", "z"]})["image"] == ["b", "z"]
    assert names({"image": [None]}, {"image": ["a"]}) == names({"image": sample_image(3)})


def test_mm_identifiers_processor_args_change_name(active: MmIdentifiers) -> None:
    plain = names({"image": sample_image(1)})
    assert names({"image": sample_image(1)}, size=28) != plain
    assert names({"image": sample_image(1)}, size=28) == names({"image": sample_image(1)}, size=28)
    # The deployment's own are in the model's identity already.
    assert names({"image": sample_image(1)}, size=56) == plain


def test_mm_identifiers_noncanonical_args_get_no_key(active: MmIdentifiers) -> None:
    [name] = names({"image": sample_image(1)}, size=2.5, weird=float("nan"))["image"]
    assert key_of(name) is None


def test_mm_identifiers_array_is_named_by_its_pixels(active: MmIdentifiers) -> None:
    array = np.asarray(sample_image(1))
    [name] = names({"image": array})["image"]
    assert key_of(name) is not None
    assert active.media_name(torch.from_numpy(array.copy()), None, {}) == name
    assert names({"image": np.asfortranarray(array)})["image"] == [name]
    assert names({"image": array[:, ::-1]})["image"] != [name]
    assert names({"image": array.astype(np.int16)})["image"] != [name]
    assert active.media_name(torch.zeros(2, dtype=torch.bfloat16), None, {}) is None
    assert active.media_name({"image_embeds": 1}, None, {}) is None


def test_mm_identifiers_audio_keeps_name_of_vllm(active: MmIdentifiers) -> None:
    data = {"audio": [(np.zeros(16000, dtype=np.float32), 16000)], "image": sample_image(1)}
    items = MultiModalDataParser(target_sr=16000).parse_mm_data(data)
    theirs = ProcessorInputs([1], items).get_mm_hashes("model", "blake3")
    found = names(data)
    assert found["audio"] == theirs["audio"]
    assert found["image"] != theirs["image"]
    assert final(active, found["audio"][0]) == theirs["audio"][0]


def test_mm_identifiers_of_other_salts_differ(active: MmIdentifiers) -> None:
    [name] = names({"image": sample_image(1)})["image"]
    found = [final(active, name, salt) for salt in (None, "", "x", "y")]
    assert len(set(found)) == 4
    assert all(key_of(one) is not None for one in found)
    assert final(active, name, "x") == found[2]


def test_mm_identifiers_tower_lora_gets_no_key(active: MmIdentifiers) -> None:
    [name] = names({"image": sample_image(1)})["image"]
    assert final(active, name, identifier=f"7:{name}") == f"7:{name}"
    assert key_of(f"7:{name}") is None


def test_process_inputs_without_media_is_unchanged(active: MmIdentifiers) -> None:
    request = SimpleNamespace(mm_features=None, cache_salt=None)
    process_inputs(lambda this, r: r, None, request)
    assert request.mm_features is None


def test_mm_identifiers_inactive_keeps_names_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mm_identifiers, "_active", None)
    items = MultiModalDataParser().parse_mm_data({"image": sample_image(1)})
    assert names({"image": sample_image(1)}) == ProcessorInputs([1], items).get_mm_hashes("model", "blake3")
    feature = SimpleNamespace(mm_hash="cp1-" + "0" * 64, identifier="cp1-" + "0" * 64)
    request = SimpleNamespace(mm_features=[feature], cache_salt=None)
    assert process_inputs(lambda this, r: r, None, request) is request
    assert feature.identifier == feature.mm_hash


def test_mm_identifiers_unidentified_model_gets_local_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    one = named(config(tmp_path / "m"), tmp_path)
    monkeypatch.setattr(mm_identifiers, "_active", one)
    [name] = names({"image": sample_image(1)})["image"]
    found = [final(one, name, salt) for salt in (None, "", "x")]
    assert len(set(found)) == 3
    assert all(n.startswith("local-") and key_of(n) is None for n in found)
    [other] = names({"image": sample_image(2)})["image"]
    assert final(one, other) != found[0]


def test_mm_identifiers_unvalidated_family_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints.qwen2_audio(tmp_path / "m")
    with mock.patch.object(compat.logger, "warning") as warning:
        one = named(config(folder), tmp_path)
        monkeypatch.setattr(mm_identifiers, "_active", one)
        [name] = names({"image": sample_image(1)})["image"]
        assert final(one, name).startswith("local-")
    warning.assert_called_once()
    assert "not been tested with vllm's embeddings of 'qwen2_audio'" in str(warning.call_args)


def test_identifier_while_weights_are_read_waits_once(
    llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    go = threading.Event()

    def slow(config: Any) -> Any:
        assert go.wait(60)
        return tower_identity(config)

    monkeypatch.setattr(mm_identifiers, "tower_identity", slow)
    # Fifty such waits would exceed the time limit of the test.
    monkeypatch.setattr(weights_guard, "INITIAL_WAIT_S", 3.0)
    one = named(config(llava), tmp_path)
    name = "cp1-" + "1" * 64
    with within(25 * 0.3, "one wait for all images of all requests"):
        for _ in range(50):
            assert one.create_identifier(name, None).startswith("local-")
    go.set()
    end_s = time.monotonic() + 30
    while key_of(one.create_identifier(name, None)) is None:
        assert time.monotonic() < end_s, "the model stays unidentified"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, True),
        (
            {
                "ec": "Other",
                "kv": SimpleNamespace(kv_connector="CornplugConnector", kv_connector_extra_config={}),
            },
            True,
        ),
        ({"ec": "Other", "kv": SimpleNamespace(kv_connector="Other", kv_connector_extra_config={})}, False),
        ({"ec": "Other"}, False),
        ({"multimodal_config": None}, False),
    ],
)
def test_input_processor_init_without_cornplug_stays_inactive(
    llava: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], wanted: bool
) -> None:
    monkeypatch.setattr(mm_identifiers, "_active", None)
    monkeypatch.setattr(mm_identifiers, "_has_connectors", False)
    calls: list[Any] = []
    make_input_processor(lambda *a, **k: calls.append((a, k)), "self", config(llava, **fields), x=1)
    assert len(calls) == 1
    assert names({"image": sample_image(1)})["image"][0].startswith("cp1-") is wanted


def test_input_processor_init_without_secret_stays_inactive(
    llava: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setattr(mm_identifiers, "_active", None)
    monkeypatch.setattr(mm_identifiers, "_has_connectors", False)
    extra = {"store.secret_file": str(tmp_path / "home" / "secret")}
    make_input_processor(lambda *a: None, "self", config(llava, extra=extra))
    ours = "cp1-" + "0" * 64
    got = get_mm_hashes(lambda *a: {"image": ["theirs", ours]}, None, None)
    assert got == {"image": ["theirs", f"foreign-{ours}"]}, "a client's uuid still passes for none of ours"


# -- what an engine's model is ----------------------------------------------------------------


def test_tower_identity_follows_engine_settings(
    llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_config, "validated_families", lambda *_: frozenset({"llava"}))
    base = tower_identity(config(llava))
    assert base.identity == base.served_identity
    others = [
        tower_identity(config(llava, dtype=torch.bfloat16)),
        tower_identity(config(llava, mm_processor_kwargs={"size": 28})),
        tower_identity(config(llava, quantization="fp8")),
        tower_identity(config(llava, model_impl="transformers")),
    ]
    assert len({base.identity, *(o.identity for o in others)}) == 5
    # No service knows of a deployment's own settings.
    assert [o.served_identity is not None for o in others] == [True, True, False, False]
    declared = tmp_path / "declared"
    shutil.copytree(llava, declared)
    described = json.loads((llava / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (declared / "config.json").write_text(json.dumps(described))
    assert tower_identity(config(declared, quantization="awq")).identity == base.identity


def test_tower_identity_with_video_pruning_is_not_served(llava: Path) -> None:
    """Pruning writes into images' embeddings too; no service does it."""
    plain = tower_identity(config(llava, multimodal_config=SimpleNamespace(video_pruning_rate=0.0)))
    assert plain == tower_identity(config(llava))
    pruned = SimpleNamespace(video_pruning_rate=0.5, video_pruning_method="evs")
    assert tower_identity(config(llava, multimodal_config=pruned)).served_identity is None
    assert tower_identity(config(llava, multimodal_config=pruned)).identity != plain.identity


@pytest.mark.parametrize(("levels", "width"), [(None, 64), ([], 64), ([8, 16, 24], 256)])
def test_embedding_width_counts_deepstack_levels(llava: Path, levels: list[int] | None, width: int) -> None:
    vision = SimpleNamespace() if levels is None else SimpleNamespace(deepstack_visual_indexes=levels)
    hf_config = SimpleNamespace(vision_config=vision)
    assert embedding_width(config(llava, hf_config=hf_config, get_hidden_size=lambda: 64)) == width


def test_kv_identity_follows_language_model(llava: Path, tmp_path: Path) -> None:
    fingerprint, spec = kv_identity(config(llava))
    assert spec["dtype"] == "float32"
    assert "max_model_len" not in spec
    other = checkpoints.llava(tmp_path / "o", llm_seed=9)
    assert kv_identity(config(other))[0] != fingerprint
    described = json.loads((llava / "config.json").read_text())
    described["text_config"]["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    stretched = tmp_path / "dynamic"
    shutil.copytree(llava, stretched)
    (stretched / "config.json").write_text(json.dumps(described))
    assert kv_identity(config(stretched))[1]["length"]["max_model_len"] == 2048


def test_vllm_items_get_unwraps_media_with_bytes() -> None:
    """`_get_mm_hashes` relies on these classes' `get`."""
    wrapped = MediaWithBytes(sample_image(1), b"anything")
    items = MultiModalDataItems({"image": ImageProcessorItems([wrapped])})
    assert isinstance(items["image"].get(0), Image.Image)


def test_identifier_after_update_is_of_the_new_weights_and_their_epoch(tmp_path: Path) -> None:
    old = checkpoints.qwen2_vl(tmp_path / "old")
    new = checkpoints.qwen2_vl(tmp_path / "new", llm_seed=21, tower_seed=22)
    one, state = named(config(old), tmp_path), engine_state.current()
    name = "cp1-" + "1" * 64
    before = one.create_identifier(name, None)
    assert key_of(before) is not None
    odd = state.begin_update()
    assert key_of(one.create_identifier(name, None), 2) is None
    state.end_update(odd, str(new), 2**62)
    after = one.create_identifier(name, None)
    fresh = Checkpoint.open(str(new)).identity("float32").identity
    assert key_of(after, 2) == embedding_key(SECRET, fresh, b"\x11" * 32, None)
    assert key_of(after) is None
    assert key_of(before, 2) is None
