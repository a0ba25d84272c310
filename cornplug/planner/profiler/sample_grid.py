"""Requests with which an engine's iteration times are measured, and the computation of these times.

The duration of these requests contains the following times:

1 prompt token, 1 output token           an iteration with one token, and all time off the device
n prompt tokens, 1 output token          an iteration with n prompt tokens, and all time off the device
many output tokens, b requests at once   iterations that generate one token for each of b requests
many output tokens after a long prompt   the same iterations with more context
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from cornplug.errors import ConfigError, CornplugError
from cornplug.planner.inputs.profile_tables import ProfileRow

_SHORT_TOKENS = 16
"""Prompt length of the requests that time decode iterations. It is short, so that context adds almost no
time."""


@dataclass(frozen=True, slots=True)
class GridPoint:
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TimedPoint:
    point: GridPoint
    seconds: float
    """Seconds from sending the request until its last token.

    The times of single tokens are not used, because an engine whose API process is delayed sends several
    tokens together.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGrid:
    """Lengths and batch sizes of the requests to measure."""

    prompts: tuple[int, ...]
    """Prompt lengths in tokens, ascending."""
    batches: tuple[int, ...]
    """Numbers of requests that decode together, ascending. The first is 1."""
    output_tokens: int
    """Output tokens of the requests that time decode iterations."""
    repeats: int
    """Number of measurements of each request that is sent alone."""

    def __post_init__(self) -> None:
        for field, values in (("prompts", self.prompts), ("batches", self.batches)):
            if not values or values[0] < 1 or any(b <= a for a, b in pairwise(values)):
                raise ConfigError(
                    field, f"{values} is not ascending", "Write whole numbers above 0, as in 64,256,1024"
                )
        if self.batches[0] != 1:
            raise ConfigError("batches", "batch size 1 is missing", "Start with 1, as in 1,2,4,8")
        if self.output_tokens < 8:
            raise ConfigError(
                "output_tokens",
                f"{self.output_tokens} tokens are too few to measure",
                "Set 8 or more, such as 32",
            )

    def limit_to(self, max_model_len: int) -> SampleGrid:
        """Return the grid without the prompts that do not fit into `max_model_len` with their output tokens.
        Raises ConfigError if no prompt fits."""
        fitting = tuple(p for p in self.prompts if p + self.output_tokens <= max_model_len)
        if not fitting:
            raise ConfigError(
                "prompts",
                f"no length fits into {max_model_len} tokens with {self.output_tokens} output tokens",
                f"Add a length of at most {max_model_len - self.output_tokens}",
            )
        return replace(self, prompts=fitting)

    def isolated_requests(self) -> list[GridPoint]:
        """Return the requests to send one after another. The first request with each pair of lengths is
        warm-up.

        Requests with different lengths alternate, so that other work on the machine affects all of them.
        """
        kinds = [
            GridPoint(1, 1),
            *(GridPoint(p, 1) for p in (_SHORT_TOKENS, *self.prompts)),
            *(GridPoint(p, self.output_tokens) for p in (_SHORT_TOKENS, self.prompts[-1])),
        ]
        return list(dict.fromkeys(kinds)) * (self.repeats + 1)

    def batched_requests(self, batch: int) -> list[GridPoint]:
        """Return the requests to send `batch` at a time. Each wave of `batch` requests has the same lengths,
        so the requests of a wave end together. The first two waves are warm-up."""
        wave = [GridPoint(_SHORT_TOKENS, n) for n in (1, self.output_tokens) for _ in range(batch)]
        return wave * (self.repeats // 2 + 2)

    def rows(
        self,
        isolated: Sequence[TimedPoint],
        batched: Mapping[int, Sequence[TimedPoint]],
        **cell: str | int | None,
    ) -> list[ProfileRow]:
        """Return the rows of a profile table for these results, which include the warm-up requests. `cell`
        contains the other fields of `ProfileRow`.

        Decode times are for an empty context, and the time for each context token is a separate row. The time
        off the device is the duration of a request with one prompt token and one output token, minus a decode
        iteration with one request, which takes as long as the prefill of one token.
        """
        counted = isolated[len(isolated) // (self.repeats + 1) :]
        batches = {1: self._step_s(counted, _SHORT_TOKENS)}
        for batch, timed in batched.items():
            batches[batch] = self._step_s(timed[2 * batch :], _SHORT_TOKENS)
        context_s = self._context_s(counted, batches[1])
        mean_context = _SHORT_TOKENS + self.output_tokens / 2
        decode = {b: max(s - b * mean_context * context_s, s / 2) for b, s in sorted(batches.items())}
        overhead_s = max(_seconds(counted, GridPoint(1, 1)) - decode[1], 0.0)

        def row(kind: str, x: float, seconds: float) -> ProfileRow:
            return ProfileRow(kind=kind, x=x, seconds=seconds, **cell)  # type: ignore[arg-type]

        prefill = {p: max(_seconds(counted, GridPoint(p, 1)) - overhead_s, decode[1]) for p in self.prompts}
        return [
            *(row("prefill", p, s) for p, s in prefill.items()),
            *(row("decode", b, s) for b, s in decode.items()),
            *(row(kind, 1, s) for kind, s in (("kv_token", context_s), ("overhead", overhead_s)) if s > 0),
        ]

    def _step_s(self, timed: Sequence[TimedPoint], prompt_tokens: int) -> float:
        """Return the seconds of one decode iteration after prompts of this length.

        Raises CornplugError if more output tokens did not take more time, because noise then exceeds the
        times.
        """
        many, one = (_seconds(timed, GridPoint(prompt_tokens, n)) for n in (self.output_tokens, 1))
        if many <= one:
            raise CornplugError(
                f"{self.output_tokens} output tokens after {prompt_tokens} prompt tokens took {many:.4f} s, "
                f"and a single output token took {one:.4f} s. The machine is busy with other work, or the "
                "model is too small to measure",
                reason="noise",
            )
        return (many - one) / (self.output_tokens - 1)

    def _context_s(self, timed: Sequence[TimedPoint], short_s: float) -> float:
        """Return the seconds that one token of context adds to a decode iteration, or 0 if the noise exceeds
        it."""
        longest = self.prompts[-1]
        if longest <= _SHORT_TOKENS:
            return 0.0
        return max(self._step_s(timed, longest) - short_s, 0.0) / (longest - _SHORT_TOKENS)


def _seconds(timed: Iterable[TimedPoint], point: GridPoint) -> float:
    return median(t.seconds for t in timed if t.point == point)
