"""docs/index.md: the table of a run of script/demo, from docs/demo.json (`script/demo --save`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from .markdown import notice, table

_RECORD: Final = Path(__file__).parents[2] / "docs" / "demo.json"
_HEAD: Final = (
    "app",
    "image",
    "tower run by",
    "embedding from",
    "prompt tokens",
    "KV reused: own, store",
    "TTFT, ms",
    "stock, ms",
    "same output",
)

_PAGE: Final = """# cornplug

{requests}

{sums}
Stock vLLM and vLLM with cornplug answered the same requests, one by one, on {machine}: three small
models with random weights, no GPU. [Measured](measured.md) has more runs than this one. `script/demo` makes
the table on your machine ([columns](../examples/two_apps_one_encoder/README.md)).

{notice}

cornplug is a plugin for unmodified vLLM and SGLang. Servers of one host reuse each other's image embeddings
and prefix KV cache, across models and across both engines ([concepts](concepts.md)). When cornplug dies, the
engine continues as stock.

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
        "[glossary](glossary.md)",
    ),
}


def page() -> str:
    """The text of docs/index.md."""
    record = json.loads(_RECORD.read_text())
    return _PAGE.format(
        requests=table(_HEAD, _rows(record["requests"])),
        sums=_sums(record),
        machine=_machine(record["machine"]),
        notice=notice("`docs/demo.json`"),
        guide=table(("you want to", "read"), ((want, ", ".join(pages)) for want, pages in _GUIDE.items())),
    )


def _rows(requests: list[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    act = ""
    for row in requests:
        if row["act"] != act:
            act = row["act"]
            yield (f"**{act}**", *[""] * (len(_HEAD) - 1))
        yield (
            row["app"],
            row["image"],
            row["tower"],
            row["embedding"],
            str(row["prompt_tokens"]),
            f"{row['kv_own']}, {row['kv_store']}",
            str(row["ttft_ms"]),
            str(row["stock_ttft_ms"]),
            "yes" if row["same"] else "**no**",
        )


def _sums(record: Mapping[str, Any]) -> str:
    saved = record["stock_ttft_s"] - record["ttft_s"]
    passes, images = record["tower_passes"], record["distinct_images"]
    return (
        f"{passes} tower passes for {images} distinct images of all apps, "
        f"{record['tower_passes_of_engines']} of them by engines;\n"
        f"{record['kv_tokens_of_the_store']:,} tokens of KV came from the store; of stock's "
        f"{record['stock_ttft_s']:.1f} s until first tokens {saved:.1f} s were saved\n"
        f"({saved / record['stock_ttft_s']:.0%}), losses counted."
    )


def _machine(machine: Mapping[str, Any]) -> str:
    day = machine["date"].split()[0]
    return f"{machine['cores']} cores ({machine['cpu']}), vLLM {machine['versions']['vllm']}, on {day}"
