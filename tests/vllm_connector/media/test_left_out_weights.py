"""What a worker says of the weights that it did not load."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expected_errors import expect_error
from torch import nn
from vllm.model_executor.models.utils import StageMissingLayer, no_init_weights
from vllm.v1.kv_cache_interface import FullAttentionSpec

from cornplug.errors import ConfigError
from cornplug.vllm_connector.compat import EC_CONNECTOR
from cornplug.vllm_connector.media import partial_models


class Model(nn.Module):
    """A tower as vLLM's models have one: 8 * 4 + 4 weights of 4 bytes."""

    def __init__(self, absent: bool) -> None:
        super().__init__()
        self.absent = absent
        if absent:
            with no_init_weights(self, lambda module: StageMissingLayer("vision_tower", module)):
                self.vision_tower = nn.Linear(8, 4)
        else:
            self.vision_tower = nn.Linear(8, 4)
        self.language_model = nn.Linear(4, 4)


SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
SPECS = {"layers.0": SPEC, "layers.1": SPEC}


def worker(model: nn.Module, secret: Path, tower: str = "service") -> Any:
    extra = {
        "engine.tower": tower,
        "encoder.engine_urls": "http://a:8750",
        "store.secret_file": str(secret),
    }
    return SimpleNamespace(
        rank=0,
        vllm_config=SimpleNamespace(
            kv_transfer_config=None,
            ec_transfer_config=SimpleNamespace(ec_connector=EC_CONNECTOR, ec_connector_extra_config=extra),
            model_config=SimpleNamespace(model="m"),
        ),
        model_runner=SimpleNamespace(get_model=lambda: model),
    )


def test_report_of_left_out_weights_says_their_bytes_and_the_tokens_that_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.cornplug")
    logging.getLogger("vllm").propagate = True
    partial_models.report_excluded_weights(worker(Model(absent=True), tmp_path / "s"), SPECS)
    # A token: 2 layers of K and V, 2 heads of 8 numbers of 4 bytes.
    assert "vision_tower (144 bytes)" in caplog.text
    assert "KV of 0 tokens, at 256 bytes per token" in caplog.text
    assert partial_models.excluded_weight_bytes(Model(absent=True)) == {"vision_tower": 144}


def test_report_of_a_loaded_tower_ends_the_start_where_the_service_has_it(tmp_path: Path) -> None:
    with expect_error(ConfigError, field="--cornplug-tower service", match="loaded the tower"):
        partial_models.report_excluded_weights(worker(Model(absent=False), tmp_path / "s"), SPECS)
    partial_models.report_excluded_weights(worker(Model(absent=False), tmp_path / "s", tower="engine"), SPECS)
