"""The rig of several cache groups, with an EAGLE head in the group of full attention, or in one of windows.

The draft proposes three tokens a step, some of them wrong: their KV is written and has to be overwritten. A
layer of the draft keeps what a layer of the model would; that EAGLE sees a token one place early is left out.
"""

from __future__ import annotations

import random
import zlib
from types import SimpleNamespace
from typing import Any

from vllm.v1.outputs import DraftTokenIds

from ..rig import HEADS
from .group_rig import ALSO_WINDOWED, FULL, LAYERS, WINDOWED, GroupCore

RIGHT, WRONG = 7, 8


def drafting(
    *, method: str = "eagle3", heads: int = HEADS, tp: int = 1, dynamic: bool = False, tokens: int = 3
) -> Any:
    """vLLM's settings of a draft, as far as its scheduler and the connector read them."""
    eagle = method != "draft_model"
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=tokens,
        num_speculative_tokens_per_batch_size=None,
        max_num_new_slots_for_drafting=0 if eagle else 1,
        use_eagle=lambda: eagle,
        use_eagle_block_drop=lambda: eagle,
        needs_eagle_block_drop=lambda: eagle,
        disable_eagle_block_drop=False,
        disable_lookahead_block_hashes=False,
        use_dflash=lambda: False,
        use_dspark=lambda: False,
        use_multi_module_mtp=lambda: False,
        uses_draft_model=lambda: not eagle,
        uses_draft_kv_cache=lambda: True,
        uses_dynamic_speculative_decoding=lambda: dynamic,
        draft_model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
        draft_parallel_config=SimpleNamespace(tensor_parallel_size=tp),
    )


class DraftingCore(GroupCore):
    """One engine with a draft of one layer."""

    def __init__(self, *args: Any, windowed: bool = False, method: str = "eagle3", **options: Any) -> None:
        draft = [LAYERS]
        self.layers = (
            (WINDOWED, FULL, [*ALSO_WINDOWED, *draft])
            if windowed
            else (WINDOWED, [*FULL, *draft], ALSO_WINDOWED)
        )
        self.speculative = drafting(method=method, tp=options.get("tp", 1))
        self._chance = random.Random(0)
        self.accepted = self.rejected = 0
        super().__init__(*args, **options)

    def step(self) -> None:
        super().step()
        running = [request.request_id for request in self.scheduler.running]
        proposals = [self._chance.choices([RIGHT, WRONG], [4, 1], k=3) for _ in running]
        self.scheduler.update_draft_token_ids(DraftTokenIds(running, proposals))

    def _sampled(self, output: Any, name: str) -> list[int]:
        proposed = output.scheduled_spec_decode_tokens.get(name, [])
        right = proposed.index(WRONG) if WRONG in proposed else len(proposed)
        self.accepted += right
        self.rejected += len(proposed) - right
        return [RIGHT] * (right + 1)

    def _moves(self, output: Any) -> Any:
        moves = super()._moves(output)
        for name, proposed in output.scheduled_spec_decode_tokens.items():
            (state,), made = self._made[name][0], list(moves.bases[name])
            for token in proposed:
                state = zlib.crc32(token.to_bytes(4, "big"), state)
                made.append(float(state % 1000))
            moves.bases[name] = made
        return moves
