"""Counts of several processes, through SGLang's own folder of metrics."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest, multiprocess

from cornplug.sglang_hooks import stats

from .zygote import Zygote

# A process of SGLang: settings published under a role, then our counts.
_PROCESS = """
import sys
from sglang.srt import runtime_context
from sglang.srt.server_args import ServerArgs
role, enabled, world_rank = sys.argv[1], sys.argv[2] == "metrics", int(sys.argv[3])
from cornplug.sglang_hooks import activation
activation.tally().count("cornplug_saves_total", "chat", "kv_page", "too_early")
args = ServerArgs(model_path="dummy", device="cpu", tp_size=2, enable_metrics=enabled)
ranks = None
if role == "scheduler":
    ranks = runtime_context.SpawnRanks(world_rank=world_rank, dp_rank=None, gpu_id=0)
runtime_context.publish(args, role=role, ranks=ranks)
tally = activation.tally()
tally.count("cornplug_hits_total", "chat", "kv_page", "store", amount=3)
tally.observe("cornplug_wait_seconds", 0.02, "chat", "kv_page")
drained = tally.drain()
assert drained["cornplug_hits_total"] == [(("chat", "kv_page", "store"), [3])], drained
assert drained["cornplug_wait_seconds"] == [(("chat", "kv_page"), [0.02])], drained
"""


def shown(zygote: Zygote, folder: Path, *processes: tuple[str, str, int]) -> str:
    """/metrics after these processes (role, "metrics" or not, rank) have run."""
    folder.mkdir()
    env = {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    for role, enabled, rank in processes:
        done = zygote.run(role, enabled, str(rank), code=_PROCESS, env=env)
        assert done.returncode == 0, done.stderr
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(folder))
    return generate_latest(registry).decode()


def test_stats_of_processes_add_up_without_other_ranks(zygote: Zygote, tmp_path: Path) -> None:
    text = shown(
        zygote,
        tmp_path / "on",
        ("tokenizer", "metrics", 0),
        ("scheduler", "metrics", 0),
        ("scheduler", "metrics", 1),
    )
    assert 'cornplug_hits_total{app="chat",kind="kv_page",source="store"} 6.0' in text
    assert 'cornplug_wait_seconds_count{app="chat",kind="kv_page"} 2.0' in text
    assert "too_early" not in text


def test_stats_without_enable_metrics_write_nothing(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "off"
    assert "cornplug" not in shown(zygote, folder, ("scheduler", "no", 0))


def test_server_tally_keeps_bounded_samples() -> None:
    tally = stats.ServerTally()
    for _ in range(stats._MAX_SAMPLES + 10):
        tally.observe("cornplug_wait_seconds", 0.1, "a", "kv_page")
    ((_, samples),) = tally.drain()["cornplug_wait_seconds"]
    assert len(samples) == stats._MAX_SAMPLES
