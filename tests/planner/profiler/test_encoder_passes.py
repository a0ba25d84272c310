"""From an encoder service's counters to a table of batches."""

import httpx
import pytest
from expected_errors import expect_error

from cornplug.errors import ConfigError, CornplugError
from cornplug.planner import encoder_passes
from cornplug.planner.encoder_passes import BenchRound, PassCounter, latency_rows, read_pass_counter


def sent(pictures, passes_, *, a=0.02, b=0.001, around=0.005, tokens=256):
    tower_s = a * passes_ + b * pictures * tokens
    return BenchRound(pictures, pictures * tokens, around + tower_s, PassCounter(passes_, tower_s))


def test_encoder_passes_batch_takes_tower_time_and_overhead():
    rounds = [sent(1, 1), sent(1, 1), sent(4, 1), sent(4, 1)]
    rows = latency_rows(rounds, 1, gpu="L4")

    assert [row.x for row in rows] == [256, 1024]
    assert [row.seconds for row in rows] == pytest.approx([0.025 + 0.256, 0.025 + 1.024])


def test_points_images_in_two_passes_are_two_batches():
    rows = latency_rows([sent(1, 1), sent(4, 2)], 4, gpu="L4")

    assert [row.x for row in rows] == [4 * 256, 4 * 512]
    assert rows[1].seconds == pytest.approx(0.025 + 0.512)


def test_points_without_single_image_are_refused():
    with expect_error(ConfigError, field="batches"):
        latency_rows([sent(4, 1)], 1, gpu="L4")


def test_passes_of_other_server_metrics_are_refused(monkeypatch):
    def get(url, **_):
        return httpx.Response(200, text="up 1.0\n", request=httpx.Request("GET", url))

    monkeypatch.setattr(encoder_passes.httpx, "get", get)
    with expect_error(CornplugError, reason="server"):
        read_pass_counter("http://127.0.0.1:1")
