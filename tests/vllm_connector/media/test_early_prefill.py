"""Prefill while encoding, on vLLM's own scheduler: what each step computes while media are on their way."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from collaborators import kept, recorded
from vllm.config import ECTransferConfig
from vllm.config.ec_manager_config import EncoderCacheManagerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from cornplug.encoder_service.formats.messages import EncodeReply, WireTensor
from cornplug.engine_common.model_identity import TowerIdentity
from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector import ec_connector, plugin
from cornplug.vllm_connector.compat import EC_CONNECTOR
from cornplug.vllm_connector.media import early_prefill, encoder_requests
from cornplug.vllm_connector.media import scheduler as ec_scheduler
from cornplug.vllm_connector.media.early_prefill import (
    EarlyPrefill,
    InFlightEncoderCacheManager,
    unsupported_reason,
)
from cornplug.vllm_connector.media.encoder_requests import PendingEmbedding
from devkit import checkpoints

from ..rig import runtime
from .test_scheduler import Service

BLOCK, BLOCKS, WIDTH = 16, 1024, 64
TEXT, ROWS, BETWEEN = 20, 160, 4
"""Tokens before the first image, of an image, and behind it."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The flags of an engine with images. One for all: vLLM takes seconds to resolve it."""
    model = checkpoints.qwen2_vl(tmp_path_factory.mktemp("models") / "m", hidden_size=WIDTH)
    args = EngineArgs(
        model=str(model), dtype="float32", max_model_len=4096, block_size=BLOCK, max_num_seqs=8,
        max_num_batched_tokens=4096, enable_prefix_caching=True, kv_cache_memory_bytes=1 << 20,
    )  # fmt: skip
    plugin.register()
    return args.create_engine_config()


class Core:
    """vLLM's scheduler with our connector, and a service whose answers a test gives by hand."""

    def __init__(
        self, made: Any, patches: pytest.MonkeyPatch, kind: type[Scheduler], blocks: int, **fields: Any
    ) -> None:
        self.config = copy.copy(made)
        self.config.cache_config = copy.copy(made.cache_config)
        self.config.cache_config.num_gpu_blocks = blocks
        self.config.ec_manager_config = EncoderCacheManagerConfig()
        self.config.ec_transfer_config = ECTransferConfig(ec_connector=EC_CONNECTOR, ec_role="ec_both")
        self.service, self.skew, self.names = Service(), 0.0, 0
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + self.skew)
        inputs = SimpleNamespace(
            tower_inputs=lambda feature: {"pixel_values": WireTensor("float32", (1,), b"1234")}
        )
        store = MemoryStore(capacity_bytes=64 << 20)
        for module in (ec_scheduler, encoder_requests):
            patches.setattr(module, "time", clock)
        for name, replacement in {
            "MediaInputs": lambda config: inputs,
            "engine_encoder": lambda config, secret: self.service,
            "tower_identity": lambda config: TowerIdentity(b"i" * 32, b"s" * 32),
        }.items():
            patches.setattr(encoder_requests, name, replacement)
        patches.setattr(ec_connector, "get_runtime", lambda extra: runtime(store.connect(), **fields))
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.preparer = ThreadPoolExecutor(1)
        patches.setattr(encoder_requests, "ThreadPoolExecutor", lambda *_, **__: self.preparer)
        with (
            recorded(ec_connector, "ECScheduler") as halves,
            recorded(ec_connector, "Tally") as tallies,
            recorded(encoder_requests, "CurrentIdentity") as identities,
        ):
            self.scheduler = kind(
                self.config, cache, StructuredOutputManager(self.config), block_size=BLOCK, log_stats=False
            )
        connector: Any = self.scheduler.ec_connector
        (self.half,), (self.tally,) = halves, tallies
        self.misses: dict[str, float] = {}
        self.early = 0.0
        patches.setattr(connector, "get_ec_connector_stats", self._drained)
        assert identities[0].current()[1].wait(60)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)

    def add(self, *images: int, text: int = TEXT, max_tokens: int = 4) -> Request:
        self.names += 1
        tokens, features = [self.names] * text, []
        for image in images:
            place = PlaceholderRange(len(tokens), ROWS)
            features.append(MultiModalFeatureSpec(None, "image", f"cp1-{image:064x}", place))
            tokens += [9] * ROWS + [7] * BETWEEN
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(
            f"r{self.names}", tokens, params, None, mm_features=features, block_hasher=self.hasher
        )
        self.scheduler.add_request(request)
        return request

    def answer(self, *images: int) -> None:
        for request, future in self.service.asked:
            if int.from_bytes(request.key, "big") in images and not future.done():
                tensor = WireTensor("float32", (ROWS, WIDTH), bytes(4 * ROWS * WIDTH))
                future.set_result(
                    EncodeReply(
                        id=1,
                        key=request.key,
                        origin="computed",
                        stored=True,
                        tensor=tensor,
                        service_time_s=0.1,
                    )
                )

    def asked(self, count: int) -> None:
        """Wait until the preparing thread has sent so many requests."""
        end_s = time.monotonic() + 5
        while len(self.service.asked) < count:
            assert time.monotonic() < end_s
            time.sleep(0.001)
        self.preparer.submit(lambda: None).result(60)

    def step(self) -> Any:
        """One step of the engine: what it computes."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        sampled = [[] if self.scheduler.requests[name].is_prefill_chunk else [5] for name in names]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        self.scheduler.update_from_output(output, result)
        return output

    def _drained(self) -> None:
        """vLLM's scheduler would hand the counts to its front end."""
        counts = self.tally.drain()
        for labels, values in counts.get("cornplug_misses_total", []):
            self.misses[labels[-1]] = self.misses.get(labels[-1], 0) + sum(values)
        self.early += sum(sum(values) for _, values in counts.get("cornplug_early_prefills_total", []))

    @property
    def free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


@pytest.fixture
def core(made: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Core]]:
    cores: list[Core] = []

    def make(kind: type[Scheduler] = Scheduler, blocks: int = BLOCKS, **fields: Any) -> Core:
        cores.append(Core(made, monkeypatch, kind, blocks, **fields))
        return cores[-1]

    yield make
    for one in cores:
        one.half.close()


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_early_prefill_computes_tokens_before_first_image_in_flight(
    core: Callable[..., Core], kind: type[Scheduler]
) -> None:
    here = core(kind)
    request = here.add(1, 2, 3)
    assert here.step().num_scheduled_tokens == {}, "20 tokens are no step"
    here.asked(3)
    here.answer(1)
    output = here.step()
    assert output.num_scheduled_tokens == {"r1": TEXT + ROWS + BETWEEN}
    assert [one.identifier[-1] for one in output.ec_connector_metadata.arrived] == ["1"]
    assert here.step().num_scheduled_tokens == {}
    here.answer(3)
    assert here.step().num_scheduled_tokens == {}, "image 2 is before it"
    here.answer(2)
    output = here.step()
    assert output.num_scheduled_tokens == {"r1": 2 * (ROWS + BETWEEN)}
    assert sorted(one.identifier[-1] for one in output.ec_connector_metadata.arrived) == ["2", "3"]
    assert output.scheduled_encoder_inputs == {}, "the engine's tower ran"
    assert here.misses == {}
    assert here.early == 1, "once for image 2, however often it was looked for"
    for _ in range(5):
        here.step()
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert not kept(here.half, PendingEmbedding)
    assert request.request_id not in kept(here.half, str)
    assert here.free == BLOCKS - 1


def test_early_prefill_text_before_first_image_is_computed(core: Callable[..., Core]) -> None:
    here = core()
    here.add(1, text=300)
    assert here.step().num_scheduled_tokens == {"r1": 300}
    here.asked(1)
    here.answer(1)
    assert here.step().num_scheduled_tokens == {"r1": ROWS + BETWEEN}


def test_early_prefill_without_its_manager_defers_whole_request(core: Callable[..., Core]) -> None:
    with mock.patch.object(
        InFlightEncoderCacheManager,
        "create_manager",
        lambda **options: EncoderCacheManager(options["cache_size"]),
    ):
        here = core()
    here.add(1, text=300)
    assert here.step().num_scheduled_tokens == {}


def test_early_prefill_late_image_is_encoded_by_engine(core: Callable[..., Core]) -> None:
    here = core()
    here.add(1, 2, text=300)
    assert here.step().num_scheduled_tokens == {"r1": 300}
    here.asked(2)
    here.answer(2)
    here.skew = 1000.0
    output = here.step()
    assert output.num_scheduled_tokens == {"r1": 2 * (ROWS + BETWEEN)}
    assert output.scheduled_encoder_inputs == {"r1": [0]}
    assert here.misses == {"encoder_timeout": 1}


def test_early_prefill_text_request_is_not_held_back(core: Callable[..., Core]) -> None:
    here = core()
    here.add(1, 2, text=300)
    here.add(text=40, max_tokens=8)
    assert here.step().num_scheduled_tokens == {"r1": 300, "r2": 40}
    for _ in range(3):
        assert here.step().num_scheduled_tokens == {"r2": 1}
    here.add(text=50)
    assert here.step().num_scheduled_tokens == {"r2": 1, "r3": 50}


def test_early_prefill_aborted_request_frees_everything(core: Callable[..., Core]) -> None:
    here = core()
    here.add(1, 2, text=300)
    here.asked(0)
    here.step()
    here.asked(2)
    here.answer(1)
    assert here.step().num_scheduled_tokens == {"r1": ROWS + BETWEEN}
    assert "r1" in kept(here.half, str)
    here.scheduler.finish_requests("r1", RequestStatus.FINISHED_ABORTED)
    assert not kept(here.half, PendingEmbedding)
    assert "r1" not in kept(here.half, str)
    assert here.free == BLOCKS - 1
    manager = here.scheduler.encoder_cache_manager
    assert manager.num_freeable_slots == manager.cache_size
    here.add(text=40)
    assert here.step().num_scheduled_tokens == {"r2": 40}


def test_early_prefill_preempted_request_waits_for_all_images(core: Callable[..., Core]) -> None:
    here = core()
    request = here.add(1, 2, text=300)
    here.step()
    here.asked(2)
    here.answer(1)
    here.step()
    here.scheduler.running.remove(request)
    here.scheduler._preempt_request(request, 0.0)
    assert here.free == BLOCKS - 1
    assert here.step().num_scheduled_tokens == {}
    here.answer(2)
    output = here.step()
    assert sum(output.num_scheduled_tokens.values()) > ROWS
    assert output.scheduled_encoder_inputs == {}
    assert here.misses == {}


def test_early_prefill_holds_tenth_of_kv_cache_and_quarter_of_requests(core: Callable[..., Core]) -> None:
    here = core()
    for image in range(4):
        here.add(image, text=300)
    assert here.step().num_scheduled_tokens == {"r1": 300, "r2": 300}, "8 may run at a time"
    here = core(blocks=400)
    for image in range(4):
        here.add(image, text=500)
    assert here.step().num_scheduled_tokens == {"r1": 500}, "640 tokens are a tenth"


def test_early_prefill_shared_image_holds_both_requests_back(core: Callable[..., Core]) -> None:
    here = core()
    here.add(1, text=300)
    here.add(1, text=200)
    assert here.step().num_scheduled_tokens == {"r1": 300, "r2": 200}
    here.asked(1)
    here.answer(1)
    output = here.step()
    assert output.num_scheduled_tokens == {"r1": ROWS + BETWEEN, "r2": ROWS + BETWEEN}
    assert len(output.ec_connector_metadata.arrived) == 1


def test_early_prefill_disabled_chunked_media_ends_before_image(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch, made: Any
) -> None:
    """Gemma 3: the tokens of an image attend both ways."""
    monkeypatch.setattr(made.scheduler_config, "disable_chunked_mm_input", True)
    here = core()
    here.add(1, 2, 3)
    here.step()
    here.asked(3)
    here.answer(1, 2)
    assert here.step().num_scheduled_tokens == {"r1": TEXT + 2 * (ROWS + BETWEEN)}
    here.answer(3)
    assert here.step().num_scheduled_tokens == {"r1": ROWS + BETWEEN}


@pytest.mark.parametrize(
    ("section", "field", "value", "reason"),
    [
        ("ec_manager_config", "encoder_cache_manager_cls", "their.Manager", "sets an encoder cache manager"),
        ("model_config", "is_encoder_decoder", True, "encoder-decoder"),
        ("scheduler_config", "enable_chunked_prefill", False, "chunked prefill is off"),
        ("", "num_prefill_lookahead_tokens", 1, "draft model"),
        ("cache_config", "mamba_cache_mode", "align", "states"),
        ("multimodal", "mm_encoder_only", True, "no text"),
    ],
)
def test_why_not_names_what_excludes_early_prefill(section: str, field: str, value: Any, reason: str) -> None:
    parts: dict[str, dict[str, Any]] = {
        "ec_manager_config": {"encoder_cache_manager_cls": None},
        "model_config": {"is_encoder_decoder": False},
        "scheduler_config": {"enable_chunked_prefill": True, "max_num_seqs": 8},
        "cache_config": {"mamba_cache_mode": "none", "num_gpu_blocks": 10, "block_size": 16},
        "multimodal": {"mm_encoder_only": False, "is_multimodal_pruning_enabled": lambda: False},
        "": {"num_prefill_lookahead_tokens": 0},
    }
    assert unsupported_reason(_config(parts)) == ""
    parts[section][field] = value
    config = _config(parts)
    assert reason in unsupported_reason(config)
    early = early_prefill.create_early_prefill(config)
    assert id(config) not in early_prefill._early_by_config
    request: Any = SimpleNamespace(request_id="a", num_preemptions=0)
    assert not early.try_admit(request, 0, 1000)


def test_early_prefill_admits_nothing_before_it_is_attached() -> None:
    early = EarlyPrefill(max_tokens=1000, max_requests=1)
    request: Any = SimpleNamespace(request_id="a", num_preemptions=0)
    assert not early.try_admit(request, 0, 500)
    assert not early.is_held_back("cp1-x")
    early.enable()
    assert early.try_admit(request, 0, 500)


def _config(parts: dict[str, dict[str, Any]]) -> Any:
    sections = {name: SimpleNamespace(**fields) for name, fields in parts.items() if name}
    sections["model_config"].multimodal_config = sections.pop("multimodal")
    return SimpleNamespace(**sections, **parts[""])
