"""Kinds of SGLang servers, each with example flags, and whether their KV is shared."""

from __future__ import annotations

from typing import Final, NamedTuple


class ServerKind(NamedTuple):
    """A kind of server."""

    name: str
    args: tuple[str, ...]
    excluded_by: str = ""
    """Flag or field that excludes sharing, or "" if KV is shared."""
    remark: str = ""


_STANDALONE: Final = (
    "--speculative-algorithm", "STANDALONE", "--speculative-num-steps", "1",
    "--speculative-num-draft-tokens", "2",
)  # fmt: skip
KINDS: Final = (
    ServerKind("tensor parallelism", ("--tp-size", "2")),
    ServerKind("replicas", ("--dp-size", "2")),
    ServerKind("several tokenizers", ("--tokenizer-worker-num", "2"), remark="with images too"),
    ServerKind("LoRA", ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj")),
    ServerKind("mixed chunks", ("--enable-mixed-chunk",)),
    ServerKind("no overlap", ("--disable-overlap-schedule",)),
    ServerKind("other page sizes", ("--page-size", "16")),
    ServerKind("HiCache by hand", ("--enable-hierarchical-cache", "--hicache-ratio", "1.5")),
    ServerKind(
        "pipeline parallelism",
        ("--pp-size", "2"),
        remark="saves nothing while idle",
    ),
    ServerKind(
        "data parallel attention",
        ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
        "--attn-dp-size",
    ),
    ServerKind(
        "prefill of a PD pair",
        ("--disaggregation-mode", "prefill", "--page-size", "64"),
        remark="decode servers need the same `--page-size`",
    ),
    ServerKind(
        "prefill of a PD pair with SGLang's page size",
        ("--disaggregation-mode", "prefill"),
        "--disaggregation-mode prefill without --page-size",
    ),
    ServerKind(
        "decode of a PD pair",
        ("--disaggregation-mode", "decode", "--page-size", "64"),
        "--disaggregation-mode decode",
    ),
    ServerKind(
        "pipeline parallelism of a PD pair",
        ("--pp-size", "2", "--disaggregation-mode", "prefill", "--page-size", "64"),
        "--pp-size with --disaggregation-mode",
    ),
    ServerKind(
        "speculation by n-grams",
        ("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
        remark="with flashinfer, any breadth",
    ),
    ServerKind(
        "fp8 KV cache",
        ("--kv-cache-dtype", "fp8_e4m3"),
        remark="among servers with the same attention backend",
    ),
    ServerKind(
        "speculation by trees",
        ("--speculative-algorithm", "NGRAM"),
        "--speculative-algorithm NGRAM",
    ),
    ServerKind(
        "speculation by EAGLE-3",
        (
            "--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "1",
            "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2",
        ),
        "--speculative-algorithm EAGLE3",
    ),
    ServerKind(
        "speculation by a smaller model", (*_STANDALONE, "--speculative-eagle-topk", "1"),
        remark="KV of the draft is shared among servers with the same draft",
    ),
    ServerKind(
        "speculation by EAGLE",
        (
            "--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1",
            "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2",
        ),
        remark="KV of the draft is shared among servers with the same draft",
    ),
    ServerKind(
        "a smaller model that proposes a tree",
        (*_STANDALONE, "--speculative-eagle-topk", "2"),
        "--speculative-eagle-topk 2",
    ),
    ServerKind("embeddings", ("--is-embedding",), "--is-embedding"),
    ServerKind("dummy weights", ("--load-format", "dummy"), "--load-format"),
)  # fmt: skip
