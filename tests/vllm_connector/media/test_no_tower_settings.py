"""`--cornplug-tower service` in vLLM's arguments, and the families whose models take embeddings."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from expected_errors import expect_error
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES
from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.multimodal.parse import MultiModalDataParser

from cornplug.config import IMAGES_PER_PROMPT
from cornplug.errors import ConfigError
from cornplug.vllm_connector import flags
from cornplug.vllm_connector.compat import EC_CONNECTOR, KV_CONNECTOR, validated_families
from cornplug.vllm_connector.media import partial_models
from cornplug.vllm_connector.media.partial_models import ACCEPTS_EMBEDDINGS, check_model, exclude_tower

HERE = str(Path(__file__).parent)
"""A folder that is there: without a network vLLM looks for anything else in the hub's cache."""
EXTRA = {"engine.tower": "service", "encoder.engine_urls": "http://a:8750"}


@pytest.fixture(autouse=True)
def shared_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("CORNPLUG_STORE_SECRET_FILE", str(tmp_path / "secret"))


def arguments(extra: dict[str, Any] | None = None, **fields: Any) -> EngineArgs:
    said = EXTRA if extra is None else extra
    kv = KVTransferConfig(kv_connector=KV_CONNECTOR, kv_role="kv_both", kv_connector_extra_config=dict(said))
    role = fields.pop("ec_role", "ec_both")
    ec = ECTransferConfig(ec_connector=EC_CONNECTOR, ec_role=role, ec_connector_extra_config=dict(said))
    return EngineArgs(model=HERE, kv_transfer_config=kv, ec_transfer_config=ec, **fields)


def embedding_input(family: str, **inputs: Any) -> Any:
    """The input that vLLM's model of a family makes of embeddings in a request; None where it takes none."""
    model: Any = ModelRegistry._try_load_model_cls(CLASSES[family])
    this = MagicMock()
    this.config.vision_config.model_type = "clip_vision_model"
    try:
        made = model._parse_and_validate_image_input(this, **inputs)
    except AssertionError:
        return None
    return made if made["type"] == "image_embeds" else None


@pytest.mark.parametrize("family", sorted(validated_families("float32")))
def test_engine_arguments_families_equal_what_vllms_models_take(family: str) -> None:
    rows = torch.zeros(4, 8)
    wants_grid = ACCEPTS_EMBEDDINGS.get(family, False)
    batch = {"image_embeds": rows, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    inputs = batch if wants_grid else {"image_embeds": [rows]}
    assert (embedding_input(family, **inputs) is not None) == (family in ACCEPTS_EMBEDDINGS)
    model: Any = ModelRegistry._try_load_model_cls(CLASSES[family])
    parser: MultiModalDataParser = model._processor_factory.info(MagicMock()).get_data_parser()
    assert (parser.embedding_fields.get("image", {}).get("image_grid_thw") == "metadata") == wants_grid


def test_engine_arguments_families_are_validated_ones_only() -> None:
    assert set(ACCEPTS_EMBEDDINGS) <= validated_families("float32")


def test_leave_out_sets_vllms_flags_and_keeps_the_users_limit() -> None:
    for limit, want in ((None, None), ({"image": 3}, 3), ({"image": {"count": 2, "width": 9}}, 2)):
        args = arguments(**({} if limit is None else {"limit_mm_per_prompt": copy.deepcopy(limit)}))
        for _ in range(2):
            # A second configuration of the same arguments finds what the first one set.
            assert exclude_tower(args)
            assert args.enable_mm_embeds
            assert args.limit_mm_per_prompt == {"image": 0, "video": 0, "audio": 0}
            for said in flags.all_our_settings(args):
                assert said.get(IMAGES_PER_PROMPT) == want
            assert partial_models.runs_without_tower(args)


def test_leave_out_without_the_setting_changes_nothing() -> None:
    args = arguments({})
    assert not exclude_tower(args)
    assert not args.enable_mm_embeds
    assert not exclude_tower(EngineArgs(model=HERE))


@pytest.mark.parametrize(
    ("extra", "fields", "field", "message"),
    [
        ({"engine.tower": "service"}, {}, "--cornplug-tower service", "--cornplug-encoder http://HOST:8750"),
        (EXTRA, {"mm_encoder_only": True}, "--cornplug-tower service", "runs only its tower"),
        (EXTRA, {"ec_role": "ec_producer"}, "--cornplug-tower service", "runs only its tower"),
        (EXTRA, {"media_io_kwargs": {"image": {"image_mode": "L"}}}, "--media-io-kwargs", "decodes"),
    ],
)
def test_leave_out_of_what_the_service_cannot_do_error_names_the_flag(
    extra: dict[str, Any], fields: dict[str, Any], field: str, message: str
) -> None:
    with expect_error(ConfigError, field=field, match=message):
        exclude_tower(arguments(extra, **fields))


def test_check_model_of_another_family_error_names_family_and_remedy() -> None:
    args = arguments()
    config = SimpleNamespace(
        kv_transfer_config=args.kv_transfer_config,
        ec_transfer_config=args.ec_transfer_config,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="gemma3")),
    )
    with expect_error(ConfigError, field="--cornplug-tower service", match="'gemma3'"):
        check_model(config)
    config.model_config.hf_config.model_type = "llava"
    check_model(config)
    config.kv_transfer_config = config.ec_transfer_config = None
    with expect_error(ConfigError, field="--cornplug-tower service", match="no tower"):
        check_model(config)
