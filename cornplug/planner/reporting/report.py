"""A plan as one HTML page, for who was not at the terminal: nothing in it comes from elsewhere or runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Final

from cornplug.planner.plan import Plan, Why
from cornplug.planner.reporting import charts, checks, flow_chart, packing_chart, wording
from cornplug.planner.reporting.markup import Markup, tag, text

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
Cell = str | Markup


def html(plan: Plan) -> str:
    """The page. Everything that a plan names is escaped."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width"),
        tag("title", text(f"{plan.name}: {wording.headline(plan)}")),
        # The one string that is no Markup of ours by `text`: our own file, and CSS needs its quotes.
        tag("style", Markup((files(__package__) / "report.css").read_text(encoding="utf-8"))),
    )
    body = tag("body", *_title(plan), *_sections(plan))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _title(plan: Plan) -> Iterator[Markup]:
    yield tag("h1", text(f"{plan.name} · {wording.headline(plan)}"))
    found = f"{plan.proof.solver} in {plan.proof.seconds:.1f} s"
    yield tag(
        "p", text(f"{plan.objective}: {wording.proof(plan.proof)} · {found} · cornplug {plan.cornplug}")
    )


def _sections(plan: Plan) -> Iterator[Markup]:
    yield _section("Services and flows", flow_chart.draw(plan), _list(flow_chart.legend(plan.routes)))
    found = checks.of(plan)
    yield _section("Times against their bounds", charts.against_bounds(found), _times(found))
    if plan.why.curve:
        yield _section("Cost against the SLO", charts.cost_curve(plan.why.curve))
    yield from _why(plan.why)
    yield _section("Utilisation", charts.utilisation(plan.groups), _groups(plan))
    yield _section("Replicas on nodes", *_packing(plan))
    if plan.caches:
        rows = [
            [
                c.name,
                c.kind,
                c.component,
                f"{c.gib:g}",
                _pairs((n, wording.percent(h)) for n, h in c.hit_rate.items()),
            ]
            for c in plan.caches
        ]
        yield _section("Caches", _table(["cache", "kind", "of", "GiB", "hits"], rows))
    if plan.reservations:
        rows = [
            [r.qos, wording.percent(r.share), str(r.priority), wording.seconds(r.deadline_s)]
            for r in plan.reservations
        ]
        yield _section("Reserved", _table(["class", "share", "priority", "deadline"], rows))


def _times(found: Sequence[checks.Check]) -> Markup:
    rows: list[list[Cell]] = []
    for c in found:
        times = [wording.seconds(t) for t in (c.bound_s, c.simulated_s)]
        said, kind = checks.verdict(c)
        rows.append([c.demand, f"{c.quantity} {c.percentile}", *times, tag("span", text(said), class_=kind)])
    return _table(["requests", "", "bound", "simulated", ""], rows)


def _groups(plan: Plan) -> Markup:
    rows: list[list[Cell]] = [
        [
            str(g.replicas),
            g.service,
            g.engine,
            f"{g.gpu} ({g.nodes})",
            wording.shape(g.tp, g.pp, g.share),
            "bf16" if g.quantisation == "none" else g.quantisation,
            tag("span", text(g.profile), class_="warn" if wording.mark(g.profile) == "ESTIMATE" else None),
        ]
        for g in plan.groups
    ]
    return _table(["replicas", "service", "engine", "on", "each", "weights", "source of its times"], rows)


def _packing(plan: Plan) -> Iterator[Markup]:
    keys = [
        tag("span", tag("i", class_=f"c{colour}"), text(name)) for name, colour in packing_chart.keys(plan)
    ]
    yield tag("div", *keys, class_="keys")
    for nodes in plan.nodes:
        if nodes.count:
            beyond = nodes.count - packing_chart.MOST_NODES
            more = f", {beyond} more not drawn" if beyond > 0 else ""
            each = f"{nodes.gpus} × {nodes.gpu}, {wording.money(nodes.price_per_hour)}"
            yield tag("h3", text(f"{nodes.count} × {nodes.name}: {each}{more}"))
            yield tag("div", packing_chart.draw(plan, nodes), class_="pack")


def _why(why: Why) -> Iterator[Markup]:
    parts = []
    if why.binding:
        rows = [[b.constraint, b.text, wording.money(b.saves_per_hour)] for b in why.binding]
        parts += [
            tag("h3", text("What holds the cost up")),
            _table(["constraint", "", "without it, saved"], rows),
        ]
    if why.alternatives:
        rows = [
            [
                a.name,
                a.why_not or a.text,
                "impossible" if a.cost_per_hour is None else wording.money(a.cost_per_hour),
            ]
            for a in why.alternatives
        ]
        parts += [tag("h3", text("Next best")), _table(["instead", "", "cost"], rows)]
    if why.monolith:
        parts += [tag("h3", text("The monolith")), tag("p", text(why.monolith))]
    if why.notes:
        parts += [tag("h3", text("Notes")), _list(why.notes)]
    if parts:
        yield _section("Why this plan", *parts)


def _section(title: str, *parts: Markup) -> Markup:
    return tag("section", tag("h2", text(title)), *parts)


def _table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Markup:
    head = tag("tr", *(tag("th", text(c)) for c in columns))
    return tag("table", head, *(tag("tr", *(_cell(c) for c in row)) for row in rows))


def _cell(value: Cell) -> Markup:
    return tag("td", value if isinstance(value, Markup) else text(value))


def _list(items: Iterable[str]) -> Markup:
    return tag("ul", *(tag("li", text(item)) for item in items))


def _pairs(found: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found)
