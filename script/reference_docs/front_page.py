"""The demo's table in docs/index.md and README.md, from docs/demo.json (`script/demo --save`)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from .markdown import notice, table

_TREE: Final = Path(__file__).parents[2]
_RECORD: Final = _TREE / "docs" / "demo.json"
_README: Final = _TREE / "README.md"
_BLOCK: Final = re.compile(
    r"(<!-- The demo's table, by script/docs -->\n).*?(\n<!-- The end of it -->)", re.S
)

_PAGE: Final = """# cornplug

cornplug is a plugin for unmodified vLLM and SGLang. Servers on one host reuse each other's image embeddings
and prefix KV cache, across models and across both engines. If cornplug fails, the engines continue without
it.

The demo and the tests need neither a GPU nor a downloaded model:

```
script/demo
script/test
```

{demo}

{notice}

The demo runs [two apps](../examples/two_apps_one_encoder/README.md) with different language models and the
same vision tower. More numbers are in [measured](measured.md).

{guide}
"""
_GUIDE: Final = {
    "Try it": ("[Quickstart](quickstart.md)", "[Concepts](concepts.md)"),
    "Check your model and engine": (
        "[Limits](limits.md)",
        "[Model families](families.md)",
        "[Support matrix](support-matrix.md)",
        "[SGLang flags](sglang-kinds.md)",
    ),
    "Deploy it": (
        "[One host](deploy-one-host.md)",
        "[Many hosts](deploy-many-hosts.md)",
        "[Operate](operate.md)",
        "[Security](security.md)",
    ),
    "Combine or replace a cache": (
        "[Beside other systems](beside-other-systems.md)",
        "[Coming from LMCache](coming-from-lmcache.md)",
    ),
    "Call the encoder from an application": ("[Python API](python-api.md)", "[HTTP API](http-api.md)"),
    "Size a deployment": ("[Planner](planner.md)", "[Plan input](plan-input.md)"),
    "Find a problem": ("[Troubleshooting](troubleshooting.md)", "[Metrics](metrics.md)"),
    "Look up a setting": ("[Configuration](configuration.md)", "[Command line](command-line.md)"),
    "Change cornplug": ("[Architecture](../ARCHITECTURE.md)", "[Decisions](decisions.md)"),
}


def page() -> str:
    """The text of docs/index.md."""
    return _PAGE.format(
        demo=_demo(),
        notice=notice("`docs/demo.json`"),
        guide="\n".join(f"- {want}: {', '.join(pages)}" for want, pages in _GUIDE.items()),
    )


def readme() -> str:
    """The text of README.md, with the demo's table of now."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{_demo()}\n{found[2]}", _README.read_text())


def _demo() -> str:
    """The table of a run, with its machine and date."""
    record = json.loads(_RECORD.read_text())
    rows = record["rows"]
    stock, cornplug = (sum(row[side] for row in rows) for side in ("stock_s", "cornplug_s"))
    shown = table(
        ("request", "stock", "cornplug", "ratio"),
        (
            (row["what"], f"{row['stock_s']:.2f} s", f"{row['cornplug_s']:.2f} s", f"{row['ratio']:.2f}")
            for row in rows
        ),
    ).replace("| --- | --- | --- | --- |", "| --- | --: | --: | --: |")
    saved = f"{(stock - cornplug) / stock:.0%} less"
    return "\n".join(
        [
            shown,
            "",
            f"Time to first token, median of {record['rounds']} rounds. All requests together took",
            f"{stock:.1f} s without cornplug and {cornplug:.1f} s with it ({saved}).",
            f"Measured by `script/demo` on {_machine(record['machine'])} (commit {record['commit']}).",
        ]
    )


def _machine(machine: dict[str, Any]) -> str:
    vllm, day, load = machine["versions"]["vllm"], machine["date"].split()[0], machine["load_at_start"][0]
    cores = f"{machine['cores']} cores ({machine['cpu']}) without a GPU, at load {load:g}"
    return f"{cores}, with vLLM {vllm} and\nrandom weights, on {day}"
