"""Units of script/test-more: a test file in one environment, on one bed of vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from devkit.test_runs.outcomes import CollectedTest, run_pytest

TREE: Final = Path(__file__).parents[2]
ANYWHERE: Final = "script/test-anywhere"
"""The unit that is no test file: set-up and a smoke test in unusual places."""

VLLM: Final = ".venv"
SGLANG: Final = ".venv-sglang"
VLLM_NEXT: Final = ".venv-vllm-next"

SELECTED: Final = "more or timed"
"""Marker expression of the tests that script/test-more runs."""

INTEGRATION: Final = "tests/integration/"
INTEGRATION_BED: Final = "v1-one"
BEDS: Final[Mapping[str, Sequence[tuple[str, str]]]] = MappingProxyType(
    {
        f"{INTEGRATION}test_sharing.py": ((VLLM, "v2-gpu"), (VLLM_NEXT, "v1"), (VLLM_NEXT, "v2-gpu")),
        f"{INTEGRATION}test_two_engines.py": ((VLLM, "v2-gpu"), (VLLM_NEXT, "v2-gpu")),
        f"{INTEGRATION}test_survives_faults.py": ((VLLM_NEXT, "v2-gpu"),),
    }
)
"""Files of tests/integration -> environments and beds on which they are repeated. V2 has a GPU's layout:
on a CPU vLLM itself chooses V1."""
NOT_ON_BEDS: Final = "sglang_alone"
"""Marker of tests in which no vLLM takes part."""
SGLANG_PATHS: Final = ("tests/sglang_hooks", "tests/oracle", "tests/commands/test_engine_checks.py")
"""Tests that need SGLang in their own process."""
ONE_CORE_FOLDERS: Final = ("tests/oracle/", "tests/planner/", "tests/replay/")
"""The folders whose tests compute on one core and start no service: two of them run at once."""


@dataclass(frozen=True, order=True)
class Unit:
    """A test file in one environment, on one bed."""

    environment: str
    """Folder of the environment: ".venv"."""
    bed: str
    """Value of DEVKIT_VLLM_BED; empty if it is not set."""
    file: str
    tests: int
    """Number of tests to run."""

    @property
    def name(self) -> str:
        """Name in tables and in tests/durations.json: ".venv v1-one tests/integration/test_starts.py"."""
        return " ".join(filter(None, (self.environment, self.bed, self.file)))

    @property
    def markers(self) -> str:
        """The marker expression that selects the unit's tests."""
        on_bed = (self.environment, self.bed) in BEDS.get(self.file, ())
        return f"({SELECTED}) and not {NOT_ON_BEDS}" if on_bed else SELECTED

    @property
    def workers(self) -> int:
        """Number of pytest-xdist processes. SGLang's environment has no xdist."""
        return 2 if self.environment == VLLM and self.file.startswith(ONE_CORE_FOLDERS) else 1

    def starts_with(self, words: str) -> bool:
        """Whether these words begin the unit's name or its file, as in tests/path_map.toml."""
        return self.file.startswith(words) or f"{self.name} ".startswith(words)


def is_installed(environment: str, tree: Path = TREE) -> bool:
    """Whether script/setup made this environment."""
    return (tree / environment / "bin" / "python").exists()


def has_beds(tree: Path = TREE) -> bool:
    """Whether script/setup installed the beds: it does so on a machine without a GPU."""
    return (tree / VLLM / "vllm-beds").exists()


def collect(arguments: Sequence[str], scratch: Path) -> dict[str, list[CollectedTest]]:
    """Collect the tests marked `more` or `timed` of both engines' environments.

    Args:
        arguments: pytest arguments that narrow the selection.
        scratch: Folder for pytest's output.

    Raises RuntimeError if collection fails.
    """
    options, paths = split_paths(arguments)
    places = {VLLM: paths or ["tests"]}
    if is_installed(SGLANG):
        places[SGLANG] = [path for path in paths or SGLANG_PATHS if path.startswith(SGLANG_PATHS)]

    def collected(environment: str) -> list[CollectedTest]:
        if not places[environment]:
            return []
        output = scratch / environment
        found = run_pytest(
            ["--collect-only", "-q", "-m", SELECTED, *options, *places[environment]],
            python=TREE / environment / "bin" / "python",
            output=output,
        )
        if found.status not in (0, 5):
            last = "\n".join(output.read_text().splitlines()[-40:])
            raise RuntimeError(f"pytest could not collect the tests in {environment}:\n{last}")
        return found.collected

    return {environment: collected(environment) for environment in places}


def split_paths(arguments: Sequence[str], tree: Path = TREE) -> tuple[list[str], list[str]]:
    """Split pytest arguments into (options, test paths and node ids)."""
    paths = [word for word in arguments if not word.startswith("-") and _is_test_path(word, tree)]
    return [word for word in arguments if word not in paths], paths


def _is_test_path(word: str, tree: Path) -> bool:
    return word.startswith("tests") and (tree / word.partition("::")[0]).exists()


def units_of(
    tests: dict[str, list[CollectedTest]], *, beds: bool, installed: Callable[[str], bool] = is_installed
) -> list[Unit]:
    """The units of these tests, each bed's included, sorted by name.

    Args:
        tests: Environment -> its tests marked `more` or `timed`.
        beds: Whether the beds are installed.
        installed: Whether an environment is.
    """
    found = []
    for environment, collected in tests.items():
        for file, count in _count_by_file(collected):
            bed = INTEGRATION_BED if beds and file.startswith(INTEGRATION) else ""
            found.append(Unit(environment, bed, file, count))
    with_vllm = [test for test in tests.get(VLLM, []) if NOT_ON_BEDS not in test.markers]
    for file, count in _count_by_file(with_vllm) if beds else ():
        found += [Unit(place, bed, file, count) for place, bed in BEDS.get(file, ()) if installed(place)]
    return sorted(found, key=lambda unit: unit.name)


def _count_by_file(tests: Iterable[CollectedTest]) -> list[tuple[str, int]]:
    return list(Counter(test.file for test in tests).items())
