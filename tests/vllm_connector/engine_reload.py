"""vLLM's own reload of a model's weights, as a program: what the rank votes.

    python engine_reload.py CHECKPOINT OTHER

Prints the folder that the rank says it holds, a tab, and the reason why it does not. On the CPU, in float32.
"""

from __future__ import annotations

import os
import sys
import tempfile
from types import SimpleNamespace

os.environ.update(VLLM_PLUGINS="", VLLM_LOGGING_LEVEL="ERROR")

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.v1.worker.gpu_worker import Worker

from cornplug.engine_common import engine_state
from cornplug.vllm_connector.model.reloads import _reload_weights, rank_vote


def main(old: str, new: str) -> None:
    # As vLLM's CPUModelRunner does.
    torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda *_: None
    config = EngineArgs(
        model=old, dtype="float32", max_model_len=512, enforce_eager=True
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/group", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config)
        config.kv_transfer_config = SimpleNamespace(
            kv_connector="CornplugConnector", kv_connector_extra_config={}
        )
        runner = SimpleNamespace(
            get_model=lambda: model,
            reload_weights=lambda weights_path: reload_weights(config, model, None, weights_path, True),
        )
        worker = SimpleNamespace(vllm_config=config, model_runner=runner)
        began_ns = engine_state.file_clock_ns()
        _reload_weights(Worker.reload_weights, worker, weights_path=new)
        print("\t".join(rank_vote(worker, began_ns)))


if __name__ == "__main__":
    main(*sys.argv[1:])
