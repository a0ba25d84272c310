"""Corrections of profiles from engine metrics: one factor for prefill times, and one for decode times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, replace

from cornplug.planner.candidates.replica_configs import ReplicaConfig
from cornplug.planner.candidates.services import Service
from cornplug.planner.plan import ReplicaGroup, TimesCorrection
from cornplug.planner.simulator.step_times import CellHardware

Place = tuple[str, str, str, int, int, int, int, int, float, str]
"""(service, engine, GPU, TP, PP, DP, DCP, PCP, share, quantisation) of a replica. Replicas for which these
values are equal use the same profile."""


def place_of(of: TimesCorrection | ReplicaGroup) -> Place:
    return of.service, of.engine, of.gpu, *astuple(of.parallelism), of.share, of.quantisation


def place(service: Service, config: ReplicaConfig) -> Place:
    f = config
    return service.name, f.engine, f.gpu.name, *astuple(f.parallelism), f.share, f.quantisation


def at_place(at: Place) -> TimesCorrection:
    """Return a correction that does not change the profile's times."""
    service, engine, gpu, tp, pp, dp, dcp, pcp, share, quantisation = at
    return TimesCorrection(
        service=service,
        engine=engine,
        gpu=gpu,
        tp=tp,
        pp=pp,
        dp=dp,
        dcp=dcp,
        pcp=pcp,
        share=share,
        quantisation=quantisation,
    )


def by_place(corrections: Iterable[TimesCorrection]) -> dict[Place, TimesCorrection]:
    return {place_of(one): one for one in corrections}


def merged(earlier: Iterable[TimesCorrection], later: Iterable[TimesCorrection]) -> list[TimesCorrection]:
    """Return one correction per `Place`.

    Later corrections replace earlier corrections, because both are relative to the profile.
    """
    return list({**by_place(earlier), **by_place(later)}.values())


def corrected(hardware: CellHardware, correction: TimesCorrection | None) -> CellHardware:
    """Return the times of a replica with a correction. The memory does not change.

    The prefill factor also applies to a tower in the engine.
    """
    if correction is None:
        return hardware
    steps = hardware.steps
    if steps is not None:
        steps = steps.corrected(correction.prefill, correction.decode)
    encode = hardware.encode and hardware.encode.scaled(correction.prefill)
    return replace(hardware, steps=steps, encode=encode)
