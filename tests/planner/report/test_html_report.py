"""The page: whole, of one piece, and harmless whatever a plan's names are."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cornplug.planner.plan import CurvePoint, PlanExplanation, PlannedNodes
from cornplug.planner.report import charts, plan_folder

from ..sample_plan import group, plan

HOSTILE = "<script>alert(1)</script>\"'&"


class Page(HTMLParser):
    """What a browser would make of it: open elements, attributes, words."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def said(self) -> str:
        return "\n".join(self.words)

    def with_class(self, *names: str) -> list[dict[str, str | None]]:
        return [a for _, a in self.seen if set(names) <= set((a.get("class") or "").split())]


def number(value: str | None) -> float:
    return float(value or "nan")


def test_html_report_page_has_figures_of_plan() -> None:
    page = Page(plan_folder.html_report(plan()))
    assert page.open == []
    for value in (
        "$58.24/h",
        "optimal (proved to 0.6 %)",
        "stock[l4]",
        "$70.10/h",
        "impossible",
        "The monolith wins below",
        "MISSED",
        "44 %",
        "roofline (L4, 2026-11)",
        "chat/short TTFT P95 ≤ 500 ms 430 ms (86%)",
        "430 ms",
        "vit/E@l4, replica 1, node 0, GPU 0",
        "llm7/P@h100 → llm7/D@h100: 7.5/s",
        "bounds × 0.5: no plan",
    ):
        assert value in page.said, value


def test_html_report_extra_replicas_and_idle_gpus_are_named() -> None:
    given = plan()
    busy = group("llm7/PD@h100", "PD", replicas=3, extra_replicas=1)
    page = plan_folder.html_report(
        plan(groups=[busy], nodes=[given.nodes[0].model_copy(update={"idle_gpus": 2.0})])
    )
    assert "<td>2+1</td>" in page
    assert "2 of the 8 GPUs of h100x8 are paid for but idle" in page


def test_html_report_page_has_no_scripts_or_links() -> None:
    page = Page(plan_folder.html_report(plan()))
    tags = {tag for tag, _ in page.seen}
    assert not tags & {"script", "link", "img", "iframe", "object", "use", "a", "image", "form"}
    assert not any(
        k in ("src", "href") or k.startswith("on") for _, attributes in page.seen for k in attributes
    )
    assert not re.search(r"https?:|url\(|@import", plan_folder.html_report(plan()))
    (policy,) = [a["content"] for _, a in page.seen if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == plan_folder.CONTENT_POLICY


def test_html_report_hostile_names_are_escaped() -> None:
    given = plan()
    name = f"a{HOSTILE}"
    route = given.routes[0].model_copy(update={"app": name})
    page = Page(
        plan_folder.html_report(
            plan(
                name=name,
                groups=[group(name, "PD", service=name, profile=name)],
                routes=[route],
                latency_forecasts=[given.latency_forecasts[0].model_copy(update={"app": name})],
                nodes=[PlannedNodes(name=name, gpu=name, gpus=8, count=1, price_per_hour=1)],
            )
        )
    )
    assert "script" not in {tag for tag, _ in page.seen}
    assert f"{name} · $58.24/h" in page.said


def test_placement_chart_replicas_fill_gpus_without_overlap() -> None:
    given = plan()
    found = charts.gpu_shares(given, given.nodes[1])
    assert [(p.gpu, p.start, p.share) for p in found] == [(0, 0, 0.25), (0, 0.25, 0.25), (1, 0, 0.25)]
    big = charts.gpu_shares(
        plan(groups=[group("big", "PD", tp=8, pp=2, replicas=1, placement=[[1, 0]])]), given.nodes[0]
    )
    assert {p.node for p in big} == {1, 2}
    assert len(big) == 16


def test_flow_chart_arrows_between_columns_can_be_seen() -> None:
    columns = sorted({box.x for box in charts.flow_chart(plan()).boxes})
    assert len(columns) > 1
    assert all(b - a >= charts.BOX_WIDTH + 60 for a, b in itertools.pairwise(columns))


def test_html_report_bar_ends_at_its_limit_only_when_reached() -> None:
    shares = (0.5, 1.0, 1.15, 9.0)
    groups = [group(f"g{n}", "P", utilisation=share) for n, share in enumerate(shares)]
    page = Page(plan_folder.html_report(plan(groups=groups, latency_forecasts=[])))
    half, whole, most, beyond = (a for a in page.with_class("fill") if a.get("height") == "15")
    (limit,) = page.with_class("limit")
    assert number(whole["x"]) + number(whole["width"]) == pytest.approx(number(limit["x1"]), abs=0.02)
    assert number(half["width"]) == pytest.approx(number(whole["width"]) / 2, abs=0.02)
    assert beyond["width"] == most["width"]


def test_html_report_curve_falls_with_cost() -> None:
    points = [CurvePoint(slo_factor=f, cost_per_hour=c) for f, c in ((0.5, 9.0), (1.0, 6.0), (2.0, 6.0))]
    page = Page(plan_folder.html_report(plan(explanation=PlanExplanation(curve=points))))
    heights = [number(a["cy"]) for tag, a in page.seen if tag == "circle"]
    assert heights[0] < heights[1] == heights[2], "SVG counts y downwards"


def test_html_report_empty_plan_has_page() -> None:
    bare = plan(groups=[], routes=[], latency_forecasts=[], caches=[], reservations=[], nodes=[])
    assert "no nodes" in Page(plan_folder.html_report(bare)).said


def test_html_report_page_in_chromium_fits_phone(tmp_path: Path) -> None:
    """Wide tables scroll inside their section; the page itself does not, and asks nobody for anything."""
    browser = shutil.which("chromium")
    if browser is None or "CORNPLUG_NO_BROWSER" in os.environ:
        pytest.skip("no chromium here")
    file = tmp_path / "report.html"
    file.write_text(plan_folder.html_report(plan()), encoding="utf-8")
    probe = tmp_path / "probe.html"
    # The page runs no scripts by its own policy, so that a frame measures it from outside.
    probe.write_text(
        f"<iframe src='{file.name}' width=390 height=800 onload=\"document.title = "
        "this.contentDocument.documentElement.scrollWidth + ' ' + "
        "this.contentDocument.querySelectorAll('svg').length\"></iframe>"
    )
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    out = subprocess.run(
        [browser, *flags, f"file://{probe}"], capture_output=True, text=True, timeout=60, check=True
    )
    found = re.search(r"<title>(\d+) (\d+)</title>", out.stdout)
    assert found is not None, out.stdout[:500]
    width, pictures = map(int, found.groups())
    assert width <= 390
    assert pictures == 6
