"""Degrees of parallelism of one replica."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parallelism:
    """Degrees of parallelism that determine how a replica is divided among GPUs."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    """Number of attention-DP groups of `tp` GPUs, each with its own attention weights, requests and KV."""
    dcp: int = 1
    """Number of GPUs in a group among which a request's KV is divided."""
    pcp: int = 1
    """Number of groups of `tp` GPUs that share the tokens of each prompt and decode different requests."""

    @property
    def groups(self) -> int:
        """Number of groups of `tp` GPUs in one pipeline stage."""
        return self.dp * self.pcp

    @property
    def expert_ranks(self) -> int:
        """Number of GPUs in one pipeline stage. Experts are divided among these GPUs."""
        return self.tp * self.groups

    @property
    def ranks(self) -> int:
        """Number of processes in the replica, one per GPU."""
        return self.pp * self.expert_ranks
