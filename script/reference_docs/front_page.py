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

cornplug is a plugin for unmodified vLLM and SGLang: servers on one host reuse each other's image embeddings
and prefix KV cache, across models and across both engines ([concepts](concepts.md)). When cornplug dies, the
engine continues as stock.

The demo and the tests need neither a GPU nor a downloaded model:

```
script/demo
script/test
```

{demo}

The two apps have language models of their own and one vision tower
([the demo](../examples/two_apps_one_encoder/README.md)). [Measured](measured.md) has more runs than this one.

{notice}

{guide}
"""
_GUIDE: Final = {
    "see it work in ten minutes": ("[quickstart](quickstart.md)",),
    "know if it fits": (
        "[concepts](concepts.md)",
        "[when not to use it](when-not-to-use.md)",
        "[families](families.md)",
        "[limits](limits.md)",
        "[support matrix](support-matrix.md)",
    ),
    "replace or keep another cache": (
        "[coming from LMCache](coming-from-lmcache.md)",
        "[beside NIXL P/D](beside-nixl.md)",
        "[beside Dynamo and llm-d](beside-dynamo-and-llm-d.md)",
    ),
    "run it": (
        "[deployment](deployment.md)",
        "[operations](operations.md)",
        "[store](store.md)",
        "[quality of service](quality-of-service.md)",
    ),
    "let a security review pass": (
        "[security model](security.md)",
        "[encoder access](encoder-security.md)",
    ),
    "find out why it does not share": (
        "[troubleshooting by reason](troubleshooting.md)",
        "[metrics](metrics.md)",
    ),
    "buy machines": ("[planner](planner.md)", "[its input](plan-input.md)"),
    "look a word up": (
        "[configuration](configuration.md)",
        "[command line](command-line.md)",
        "[HTTP API](http-api.md)",
    ),
}


def page() -> str:
    """The text of docs/index.md."""
    return _PAGE.format(
        demo=_demo(),
        notice=notice("`docs/demo.json`"),
        guide=table(("you want to", "read"), ((want, ", ".join(pages)) for want, pages in _GUIDE.items())),
    )


def readme() -> str:
    """The text of README.md, with the demo's table of now."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{_demo()}\n{found[2]}", _README.read_text())


def _demo() -> str:
    """The table of a run, and what was measured where and when."""
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
    saved = f"{(stock - cornplug) / stock:.0%} saved"
    return "\n".join(
        [
            shown,
            "",
            f"Seconds to the first token, median of {record['rounds']}. Together {stock:.1f} s without",
            f"cornplug and {cornplug:.1f} s with it: {saved}.",
            f"Measured by `script/demo` on {_machine(record['machine'])}",
            f"(commit {record['commit']}).",
        ]
    )


def _machine(machine: dict[str, Any]) -> str:
    vllm, day, load = machine["versions"]["vllm"], machine["date"].split()[0], machine["load_at_start"][0]
    where = f"{machine['cores']} cores ({machine['cpu']}) without a GPU, at load {load:g}"
    return f"{where},\nwith vLLM {vllm} and random weights, on {day}"
