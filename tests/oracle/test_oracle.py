"""Keys against computed numbers, on hundreds of near-collisions.

The run ends with the table. The long run (`script/test-more`) draws thousands of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from .deployments import base
from .keys import ENGINE, room
from .oracle import Oracle, Report


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    root = tmp_path_factory.mktemp("oracle")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # equal sums in equal order
    yield Oracle(root / "written", [base(family, root / family) for family in room.FAMILIES])
    torch.set_num_threads(threads)


def check(report: Report, record_property: Callable[[str, object], None]) -> None:
    refused = f"{report.drawn - report.cases} more were drawn that transformers does not run"
    # `tests/conftest.py` shows what is recorded under this name at the end of the run.
    record_property("table", f"{report.table()}\n{refused}")
    assert not report.holes, "equal keys, other numbers:\n" + "\n".join(report.holes[:40])
    assert not report.crashed, "odd files end the reading:\n" + "\n".join(report.crashed[:40])
    assert not report.parted, "other keys, other name only:\n" + "\n".join(report.parted[:40])


@pytest.mark.timeout(300)
def test_oracle_keys_differ_where_numbers_differ(
    oracle: Oracle, record_property: Callable[[str, object], None]
) -> None:
    wanted = 200 if ENGINE == "vllm" else 80  # SGLang's keys differ from vLLM's in a few lines
    report = oracle.run(seed=1, cases=wanted)
    check(report, record_property)
    assert report.cases >= 0.97 * wanted


@pytest.mark.more
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 6 if ENGINE == "vllm" else 4))  # 3 minutes each
def test_oracle_long_run_keys_differ_where_numbers_differ(
    oracle: Oracle, record_property: Callable[[str, object], None], seed: int
) -> None:
    report = oracle.run(seed=seed, cases=1250)
    check(report, record_property)
    assert report.cases >= 1200
