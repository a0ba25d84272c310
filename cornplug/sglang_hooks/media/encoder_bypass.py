"""Loads stored embeddings instead of running the tower, and saves the embeddings that the tower computes.

This runs in the scheduler processes. The reads begin when a request arrives (`row_reads.py`). SGLang
determines which images of a batch are not in its own embedding cache, and calls the model's
`get_image_feature` for these images. `EncoderBypass` replaces that call. It loads and verifies stored
embeddings. The tower computes all other embeddings, and SGLang's own code puts both into its cache.

    images ──> EncoderBypass ──in the store──> verified, on the device ─┐
                    └─ not in the store ──> the model's own tower ──────┴─> one tensor per item

A tower may run collectives over the tensor-parallel ranks, so all ranks must run it for the same images. Each
rank reads from the store. Then only embeddings that every rank has read are used.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from cornplug.encoder_service.formats.tensors import dtype_name
from cornplug.engine_common import engine_state, weights_guard
from cornplug.engine_common.embeddings import EmbeddingPublisher, ExpectedEmbedding, TowerTimer
from cornplug.engine_common.load_policy import FetchRule
from cornplug.engine_common.runtime import EMBEDDING, EngineRuntime
from cornplug.errors import CodecError, CornplugError
from cornplug.metrics import Tally
from cornplug.sglang_hooks import activation, compat
from cornplug.sglang_hooks.compat import Hook
from cornplug.sglang_hooks.media.embedding_prefetch import source_of
from cornplug.sglang_hooks.media.placeholder_tokens import is_current, key_of, rows_of
from cornplug.sglang_hooks.media.row_reads import RowReads
from cornplug.sglang_hooks.model.model_config import engine_model

EmbedItems = Callable[[list[Any]], Any]


class EmbeddingSource:
    """Loads and saves embeddings for one scheduler process. Used only by the thread that runs the model."""

    def __init__(
        self,
        runtime: EngineRuntime,
        tally: Tally,
        *,
        device: torch.device,
        dtype: str,
        width: int,
        is_first_rank: bool,
    ) -> None:
        """Create a source.

        Args:
            device: device of the model.
            dtype: the language model's dtype: the name of the torch dtype without the "torch." prefix.
            width: number of columns of the language model's embeddings.
            is_first_rank: whether this rank is the first of its group. All ranks load the same embeddings,
                but only the first rank saves and counts them.
        """
        self._run = runtime
        self._tally = tally
        self._dtype = dtype
        self._width = width
        self._is_first_rank = is_first_rank
        self._publisher = EmbeddingPublisher(runtime, self._report)
        self._rule = FetchRule(runtime.config.store.load_when)
        self._reads = RowReads(runtime, device)
        self._tower: TowerTimer | None = None
        self._row_bytes = 0

    def prefetch(self, items: Sequence[Any]) -> None:
        """Start to read the embeddings of a request that has arrived. Returns immediately."""
        for item in items:
            key = key_of(item)
            # If the item has no source, the embedding is not expected in the store.
            if key is not None and source_of(item) is not None and is_current(item):
                self._reads.start(key)

    def load(self, items: Sequence[Any], model: Any) -> list[torch.Tensor | None]:
        """Return each item's embedding from the store, or None.

        An embedding has shape (rows, width), in the width that `model` uses, and is on the device. It is None
        if the item has no source, or if it cannot be loaded. Operations that the model starts later can use
        it.
        """
        self.prefetch(items)
        # A tower with deepstack (Qwen3-VL) also computes inputs for deeper layers, as additional columns.
        deepstack = getattr(model, "use_deepstack", None) or {}
        found = []
        for item in items:
            levels = model.deepstack_visual_indexes if deepstack.get(item.modality) else ()
            found.append(self._load_item(item, self._width * (1 + len(levels))))
        return found

    def count_used(self, items: Sequence[Any], loaded: Sequence[torch.Tensor | None]) -> None:
        """Count the embeddings in `loaded`, which the engine uses instead of running its tower."""
        app = self._run.app
        for item, tensor in zip(items, loaded, strict=True):
            if tensor is not None and self._is_first_rank:
                self._tally.count("cornplug_hits_total", app, EMBEDDING, source_of(item) or "store")
                self._tally.count("cornplug_saved_tower_passes_total", app)
                self._tally.count("cornplug_bytes_total", app, EMBEDDING, "load", amount=tensor.nbytes)

    def save_computed(self, items: Sequence[Any], made: Sequence[torch.Tensor], *, publish: bool) -> None:
        """Save the embeddings that this engine's tower has computed. Returns immediately."""
        try:
            for item, tensor in zip(items, made, strict=True):
                key = key_of(item) if publish and self._is_first_rank and is_current(item) else None
                if key is not None and dtype_name(tensor.dtype) == self._dtype:
                    self._publisher.enqueue(key, tensor, cost_s=self._rule.encode_s(len(tensor)) or 0.0)
        except Exception:  # noqa: BLE001 - any error: the engine has the embeddings
            self._log_error("offer")

    def encode(self, original: EmbedItems, items: list[Any], device: torch.device) -> Any:
        """Compute the embeddings of `items` with the model, and publish the measured cost.

        The tokenizer process decides with this cost whether to fetch embeddings.
        """
        if self._tower is None:
            self._tower = TowerTimer(device)
        self._tower.begin_step()
        made = original(items)
        self._tower.record_rows(sum(rows_of(item) for item in items))
        for rows, seconds in self._tower.take_measurements():
            self._rule.record_encode(rows, seconds)
        row_s = self._rule.encode_s(1)
        if row_s is not None and self._is_first_rank:
            pays = self._rule.should_fetch(rows=1, size_bytes=self._row_bytes)
            engine_state.current().publish_costs(encode_row_s=row_s, is_fetch_faster=pays)
        return made

    def close(self) -> None:
        """Finish pending saves."""
        self._publisher.close()
        self._reads.close()

    def _load_item(self, item: Any, width: int) -> torch.Tensor | None:
        # If the item has no source, the embedding is not expected in the store. The tokenizer has already
        # counted the miss.
        key = key_of(item)
        if key is None or source_of(item) is None:
            return None
        if not is_current(item):
            self._count_miss("weights_updated")
            return None
        began = time.perf_counter()
        try:
            found = self._reads.take(key)
            if found is None:
                raise CodecError("the embedding was evicted after the lookup", reason="evicted")
            header, rows = found
            expected = ExpectedEmbedding(key, rows_of(item), width, self._dtype)
            expected.check(header.dtype, header.shape, rows.nbytes)
            dtype = getattr(torch, header.dtype)
            tensor = self._reads.send(rows).view(dtype).view(header.shape)
            # The time that the model's thread waited.
            self._rule.record_read(rows.nbytes, time.perf_counter() - began)
            self._row_bytes = width * dtype.itemsize
        except CornplugError as e:
            self._count_miss(e.reason)
            return None
        except Exception:  # noqa: BLE001 - any error: the tower computes the embedding
            self._log_error("load")
            return None
        return tensor

    def _log_error(self, what: str) -> None:
        compat.logger.exception("cornplug: an embedding's %s failed", what)
        self._count_miss("error")

    def _count_miss(self, reason: str) -> None:
        if self._is_first_rank:
            self._tally.count("cornplug_misses_total", self._run.app, EMBEDDING, reason)

    def _report(self, outcome: str, size: int) -> None:
        self._tally.count("cornplug_saves_total", self._run.app, EMBEDDING, outcome)
        if outcome == "stored":
            self._tally.count("cornplug_bytes_total", self._run.app, EMBEDDING, "save", amount=size)


class EncoderBypass:
    """Replacement for a model's `get_image_feature` in one call of SGLang."""

    def __init__(self, original: EmbedItems, source: EmbeddingSource | None, device: torch.device) -> None:
        """Create a replacement for one call.

        `source` is None on a rank that cannot share. Such a rank still votes on the embeddings to use.
        """
        self._original = original
        self._source = source
        self._device = device
        # By these attributes, SGLang recognises encoders that move features to the device themselves.
        self.__self__ = getattr(original, "__self__", None)
        self.__name__ = getattr(original, "__name__", "")

    def __call__(self, items: list[Any]) -> Any:
        """Return the original's result for `items`, or a list of (rows, width) tensors, one per item.

        Raises only the original's exceptions.
        """
        if not any(key_of(item) is not None for item in items):
            return self._original(items)
        here = None if weights_guard.has_replaced_weights() else self._source
        taken: list[torch.Tensor | None] = [None] * len(items)
        if here is not None:
            taken = here.load(items, self.__self__)
        taken = _keep_common(taken)
        rest = [item for item, tensor in zip(items, taken, strict=True) if tensor is None]
        made = self._encode(here, rest) if rest else []
        split = _split_output(made, rest)
        if split is None:
            # The output cannot be split by items, so the engine's own computation is used for all items.
            return made if len(rest) == len(items) else self._original(items)
        if here is not None:
            here.count_used(items, taken)
            here.save_computed(rest, split, publish=not weights_guard.has_replaced_weights())
        mine = iter(split)
        return [next(mine) if tensor is None else tensor for tensor in taken]

    def _encode(self, source: EmbeddingSource | None, items: list[Any]) -> Any:
        return self._original(items) if source is None else source.encode(self._original, items, self._device)


def _split_output(made: Any, items: Sequence[Any]) -> list[torch.Tensor] | None:
    """Split the tower's output into one (rows, width) tensor per item, or return None if it cannot be
    split."""
    rows = [rows_of(item) for item in items]
    if isinstance(made, list):
        flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in made]
        return flat if [len(tensor) for tensor in flat] == rows else None
    if not isinstance(made, torch.Tensor):
        return None
    made = made.reshape(-1, made.shape[-1])
    return list(torch.split(made, rows)) if len(made) == sum(rows) else None


def _keep_common(loaded: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return `loaded`, with None for each embedding that at least one rank of the group has not loaded.

    Call this either on all ranks of the group or on none.
    """
    from sglang.srt.layers.dp_attention import get_dp_tp_group

    group = get_dp_tp_group()
    if group.world_size == 1:
        return loaded
    mask = torch.tensor([tensor is not None for tensor in loaded], dtype=torch.int32)
    torch.distributed.all_reduce(mask, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return [tensor if has else None for tensor, has in zip(loaded, mask.tolist(), strict=True)]


# -- SGLang's scheduler process --------------------------------------------------------------


@functools.cache
def _embedding_source() -> EmbeddingSource | None:
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.layers.dp_attention import get_dp_tp_group
    from sglang.srt.runtime_context import get_server_args

    device = torch.device(get_server_args().device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    try:
        return EmbeddingSource(
            activation.runtime(),
            activation.tally(),
            device=device,
            dtype=engine_model().dtype,
            width=model_config_of(get_server_args()).hidden_size,
            is_first_rank=get_dp_tp_group().rank_in_group == 0,
        )
    except CornplugError as e:
        # In this case, the tokenizer process assigns no keys and logs the reason.
        compat.logger.debug("cornplug: this server does not share embeddings: %s", e)
        return None


def _get_chunked_prefill_embedding(
    original: Callable[..., Any], data_embedding_func: EmbedItems, *args: Any, **kwargs: Any
) -> Any:
    if activation.is_on() and activation.config().engine.share_embeddings:
        input_ids = kwargs["input_ids"] if "input_ids" in kwargs else args[-1]
        data_embedding_func = EncoderBypass(data_embedding_func, _embedding_source(), input_ids.device)
    return original(data_embedding_func, *args, **kwargs)


def _on_multimodal_inputs(result: Any, scheduler: Any, mm_inputs: Any) -> None:
    from sglang.srt.managers import mm_schedule

    if result is None or not activation.is_on() or not activation.config().engine.share_embeddings:
        return
    cache = mm_schedule.embedding_cache
    missing = [item for item in result.mm_items if cache is None or not cache.has(item.hash)]
    if any(source_of(item) is not None for item in missing) and (source := _embedding_source()) is not None:
        source.prefetch(missing)


HOOKS: Final[tuple[Hook, ...]] = (
    # Every rank calls this for every request, whether the inputs come from the tokenizer or from an encoder.
    Hook("sglang.srt.managers.scheduler.Scheduler._get_multimodal_inputs", "after", _on_multimodal_inputs),
    Hook(
        "sglang.srt.managers.mm_schedule._get_chunked_prefill_embedding",
        "around",
        _get_chunked_prefill_embedding,
    ),
)
