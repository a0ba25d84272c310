"""Twenty-odd inputs that differ in what a plan's times depend on: structure, load, bursts, mix, SLO."""

from __future__ import annotations

from typing import Any

from planner.made_inputs import QWEN_7B, QWEN_VIT

Table = dict[str, Any]

LLAMA_70B = {
    "kind": "llm", "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128,
    "parameters": 70.6e9,
}  # fmt: skip
QWEN_2B = {
    "kind": "llm", "layers": 28, "hidden": 1536, "heads": 12, "kv_heads": 2, "head_dim": 128,
    "parameters": 1.5e9,
}  # fmt: skip
SPEECH = {"kind": "generator", "parameters": 5e8, "flops_per_unit": 4e12}
MEASURED: Table = {
    "kind": "table", "gpu": "A100-80", "tp": 1,
    "prefill_tokens": [128, 1024, 8192], "prefill_s": [0.02, 0.11, 0.95],
    "decode_requests": [1, 32, 128], "decode_s": [0.013, 0.016, 0.028],
    "kv_token_s": 4e-8, "mixed_factor": 1.1, "request_overhead_s": 0.01, "kv_tokens": 300_000,
}  # fmt: skip
POOLS = {
    "l4": {"name": "l4", "gpu": "L4", "gpus": 4},
    "a100": {"name": "a100", "gpu": "A100-80", "gpus": 8},
    "h100": {"name": "h100", "gpu": "H100", "gpus": 8},
}
PICTURE: Table = {"encoder": "vit", "tokens": 600}
SHORT: Table = {"prompt": {"mean": 300, "cv": 0.8, "max": 4000}, "output": {"mean": 150, "max": 1000}}
LONG: Table = {"prompt": {"mean": 3000, "cv": 1.0, "max": 16_000}, "output": {"mean": 80, "max": 800}}
CHATTY: Table = {"prompt": 200, "output": {"mean": 500, "cv": 0.7, "max": 2000}}


def llm(shape: Table, name: str = "llm", **more: Any) -> Table:
    return {"name": name, "kind": "llm", "shape": shape, "tp": [1, 2, 4], "engines": ["vllm"]} | more


def vit(**more: Any) -> Table:
    return {"name": "vit", "kind": "encoder", "shape": QWEN_VIT, "shares": [0.5, 1]} | more


def request(name: str, rate: float, sizes: Table, **more: Any) -> Table:
    return {"name": name, "rate": rate} | sizes | more


def app(name: str, requests: list[Table], slo: Table, **more: Any) -> Table:
    return {"name": name, "llm": "llm", "slo": slo, "requests": requests} | more


def tables(components: list[Table], applications: list[Table], pool: list[str], **rules: Any) -> Table:
    return {
        "components": components,
        "applications": applications,
        "pool": [POOLS[name] for name in pool],
        "rules": rules,
        "solver": {"gap": 0.02, "time_limit_s": 10},
    }


SCENARIOS: dict[str, Table] = {
    "one class, one model": tables(
        [llm(QWEN_7B)], [app("chat", [request("short", 12, SHORT)], {"ttft_s": 0.5, "tpot_s": 0.05})], ["l4"]
    ),
    "tight tokens": tables(
        [llm(QWEN_7B)],
        [app("chat", [request("short", 12, SHORT)], {"ttft_s": 1.0, "tpot_s": 0.02})],
        ["a100", "h100"],
    ),
    "loose bounds, high load": tables(
        [llm(QWEN_7B)],
        [app("chat", [request("chatty", 6, CHATTY)], {"ttft_s": 4.0, "tpot_s": 0.1})],
        ["a100"],
        n_plus_one=False,
        online_share=0.95,
    ),
    "bursty": tables(
        [llm(QWEN_7B)],
        [app("chat", [request("short", 20, SHORT, burst=4.0)], {"ttft_s": 1.0, "tpot_s": 0.05})],
        ["a100"],
    ),
    "even arrivals": tables(
        [llm(QWEN_7B)],
        [app("chat", [request("long", 4, LONG, burst=0.3)], {"ttft_s": 2.0, "tpot_s": 0.06})],
        ["a100"],
    ),
    "short and long share a pool": tables(
        [llm(QWEN_7B)],
        [
            app(
                "chat", [request("short", 15, SHORT), request("long", 2, LONG)], {"ttft_s": 2, "tpot_s": 0.06}
            ),
            app("agent", [request("chatty", 3, CHATTY)], {"tpot_s": 0.05, "e2e_s": 60}),
        ],
        ["a100", "h100"],
    ),
    "prefill and decode apart": tables(
        [llm(QWEN_7B)],
        [app("docs", [request("long", 6, LONG)], {"ttft_s": 1.5, "tpot_s": 0.03}, structures=["P+D"])],
        ["h100"],
    ),
    "apart, chatty and bursty": tables(
        [llm(QWEN_7B)],
        [
            app(
                "chat",
                [request("chatty", 8, CHATTY, burst=3.0), request("long", 4, LONG, burst=3.0)],
                {"ttft_s": 2, "tpot_s": 0.04},
                structures=["P+D"],
            )
        ],
        ["a100"],
    ),
    "pictures in a monolith": tables(
        [llm(QWEN_7B), vit()],
        [
            app(
                "see",
                [request("picture", 6, SHORT, media=[PICTURE])],
                {"ttft_s": 1.5, "tpot_s": 0.06},
                structures=["monolith"],
            )
        ],
        ["a100"],
    ),
    "encoder apart": tables(
        [llm(QWEN_7B), vit()],
        [
            app(
                "see",
                [request("picture", 6, SHORT, media=[PICTURE]), request("text", 6, SHORT)],
                {"ttft_s": 1.5, "tpot_s": 0.06},
                structures=["E+PD"],
            )
        ],
        ["l4", "a100"],
    ),
    "albums with hits": tables(
        [llm(QWEN_7B), vit()],
        [
            app(
                "see",
                [request("album", 3, SHORT, media=[PICTURE | {"items": 5, "hit_rate": 0.6}], burst=2.0)],
                {"ttft_s": 2.5, "tpot_s": 0.06},
                structures=["E+PD"],
            )
        ],
        ["l4", "a100"],
    ),
    "three stages": tables(
        [llm(QWEN_7B), vit()],
        [
            app(
                "see",
                [request("picture", 10, SHORT, media=[PICTURE]), request("album", 1, LONG, media=[PICTURE])],
                {"ttft_s": 2.5, "tpot_s": 0.04},
                structures=["E+P+D"],
            )
        ],
        ["l4", "h100"],
    ),
    "two apps, one tower": tables(
        [llm(QWEN_7B), llm(QWEN_2B, "small"), vit()],
        [
            app("see", [request("picture", 5, SHORT, media=[PICTURE])], {"ttft_s": 1.5, "tpot_s": 0.05}),
            app(
                "tag",
                [request("picture", 10, {"prompt": 60, "output": 12}, media=[PICTURE])],
                {"ttft_s": 1.0},
                llm="small",
            ),
        ],
        ["l4", "a100"],
    ),
    "online beside offline": tables(
        [llm(QWEN_7B)],
        [
            app("chat", [request("short", 8, SHORT)], {"ttft_s": 1.0, "tpot_s": 0.05}),
            app("batch", [request("long", 2, LONG)], {}, workload="offline"),
        ],
        ["a100"],
    ),
    "large model": tables(
        [llm(LLAMA_70B, tp=[4, 8])],
        [app("pro", [request("short", 4, SHORT)], {"ttft_s": 1.5, "tpot_s": 0.06})],
        ["h100"],
    ),
    "measured table": tables(
        [llm(QWEN_7B, profiles=[MEASURED], tp=[1])],
        [app("chat", [request("short", 25, SHORT)], {"ttft_s": 0.5, "tpot_s": 0.05})],
        ["a100"],
    ),
    "measured table, mixed": tables(
        [llm(QWEN_7B, profiles=[MEASURED], tp=[1])],
        [
            app(
                "chat",
                [request("short", 20, SHORT), request("long", 1.5, LONG, burst=2.0)],
                {"ttft_s": 2.5, "tpot_s": 0.08},
            )
        ],
        ["a100"],
    ),
    "shared prefix": tables(
        [llm(QWEN_7B)],
        [
            app(
                "rag",
                [request("ask", 10, LONG, prefix={"tokens": 1500, "hit_rate": 0.8})],
                {"ttft_s": 1.5, "tpot_s": 0.05},
            )
        ],
        ["a100"],
    ),
    "speech, generator apart": tables(
        [llm(QWEN_2B), {"name": "tts", "kind": "generator", "shape": SPEECH}],
        [
            app(
                "say",
                [
                    request(
                        "line",
                        4,
                        {"prompt": 200, "output": 60},
                        generates={"generator": "tts", "units": {"mean": 5, "cv": 0.5, "max": 20}},
                    )
                ],
                {"ttft_s": 0.5, "e2e_s": 8.0},
                structures=["+G"],
            )
        ],
        ["l4", "a100"],
    ),
    "p99": tables(
        [llm(QWEN_7B)],
        [app("chat", [request("short", 15, SHORT)], {"percentile": "p99", "ttft_s": 1.0, "tpot_s": 0.06})],
        ["a100"],
    ),
    "end to end only": tables(
        [llm(QWEN_7B)],
        [app("tool", [request("call", 20, {"prompt": 1500, "output": 40})], {"e2e_s": 3.0})],
        ["l4", "a100"],
    ),
    "documents, two replicas": tables(
        [llm(QWEN_7B)],
        [app("docs", [request("long", 8, LONG)], {"ttft_s": 2.5, "tpot_s": 0.06})],
        ["a100"],
        router="power_of_two",
    ),
    "random router": tables(
        [llm(QWEN_7B)],
        [app("chat", [request("short", 30, SHORT)], {"ttft_s": 1.5, "tpot_s": 0.06})],
        ["a100"],
        router="random",
    ),
    "first tokens only": tables(
        [llm(QWEN_7B), vit()],
        [
            app(
                "label",
                [request("picture", 30, {"prompt": 40, "output": 1}, media=[PICTURE])],
                {"ttft_s": 1.0},
            )
        ],
        ["l4", "a100"],
    ),
}
