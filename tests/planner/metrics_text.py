"""An engine's /metrics as vLLM 0.32 and SGLang 0.5.23 write them, of so many equal requests."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


class VLLM:
    """Counts as the engine would; `text` is what it shows now."""

    def __init__(self, model: str = "org/llm7") -> None:
        self.registry = CollectorRegistry()
        names = ("model_name", "engine")
        labels = (model, "0")

        def counter(name: str) -> Counter:
            return Counter(name, name, names, registry=self.registry).labels(*labels)

        def histogram(name: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, name, names, buckets=buckets, registry=self.registry).labels(*labels)

        self.success = Counter(
            "vllm:request_success", "", (*names, "finished_reason"), registry=self.registry
        ).labels(*labels, "stop")
        self.prompt = histogram("vllm:request_prompt_tokens", BUCKETS)
        self.output = histogram("vllm:request_generation_tokens", BUCKETS)
        self.ttft = histogram("vllm:time_to_first_token_seconds", (0.01, 0.1, 0.5, 1, 5))
        self.tpot = histogram("vllm:request_time_per_output_token_seconds", (0.01, 0.05, 0.1, 0.5))
        self.queries = counter("vllm:prefix_cache_queries")
        self.hits = counter("vllm:prefix_cache_hits")
        self.waiting = Gauge("vllm:num_requests_waiting", "", names, registry=self.registry).labels(*labels)
        self.running = Gauge("vllm:num_requests_running", "", names, registry=self.registry).labels(*labels)

    def serve(
        self,
        n: int,
        prompt: float,
        output: float,
        *,
        cached: float = 0.0,
        ttft_s: float = 0.2,
        tpot_s: float = 0.02,
        seed: int = 0,
    ) -> None:
        """`n` requests with lengths about these means."""
        rng = random.Random(seed)
        for _ in range(n):
            tokens = max(int(rng.gauss(prompt, prompt / 10)), 1)
            self.success.inc()
            self.prompt.observe(tokens)
            self.output.observe(max(int(rng.gauss(output, output / 10)), 1))
            self.ttft.observe(ttft_s)
            self.tpot.observe(tpot_s)
            self.queries.inc(tokens)
            self.hits.inc(cached * tokens)

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()


class SGLang:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names, labels = ("model_name",), ("org/llm7",)

        def counter(name: str, label: str, value: str) -> Counter:
            return Counter(name, "", (*names, label), registry=self.registry).labels(*labels, value)

        def histogram(name: str) -> Histogram:
            return Histogram(name, "", names, buckets=(100, 300, 500, 1000), registry=self.registry).labels(
                *labels
            )

        self.requests = counter("sglang:num_requests_total", "is_streaming", "true")
        self.prompt_tokens = counter("sglang:prompt_tokens_total", "is_streaming", "true")
        self.cached = counter("sglang:cached_tokens_total", "cache_source", "device")
        self.prompt = histogram("sglang:prompt_tokens_histogram")
        self.output = histogram("sglang:generation_tokens_histogram")
        self.queue = Gauge("sglang:num_queue_reqs", "", names, registry=self.registry).labels(*labels)

    def serve(self, n: int, prompt: int, output: int, *, cached: float = 0.0) -> None:
        for _ in range(n):
            self.requests.inc()
            self.prompt.observe(prompt)
            self.output.observe(output)
            self.prompt_tokens.inc(prompt)
            self.cached.inc(cached * prompt)

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()
