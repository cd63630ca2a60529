"""A mock pod's /metrics: the names and labels of vLLM's own, with the model's true numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from calinix.sim.pod_model import Job, PodModel

_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKENS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5
)  # fmt: skip


class Histogram:
    """Counts by bucket, as Prometheus words them."""

    def __init__(self, name: str, bounds: tuple[float, ...], text: str):
        self.name = name
        self.text = text
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value`, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, labels: str) -> list[str]:
        """The exposition of this histogram."""
        lines = [f"# HELP {self.name} {self.text}", f"# TYPE {self.name} histogram"]
        seen = 0
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            seen += count
            le = "+Inf" if bound is None else repr(bound)
            lines.append(f'{self.name}_bucket{{{labels},le="{le}"}} {float(seen)}')
        lines.append(f"{self.name}_count{{{labels}}} {float(seen)}")
        lines.append(f"{self.name}_sum{{{labels}}} {self.sum}")
        return lines


class PodMetrics:
    """What a pod counts beside its model's totals."""

    def __init__(self, model_name: str, started_s: float):
        self.labels = f'engine="0",model_name="{model_name}"'
        self.started_s = started_s
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds", _SECONDS, "Time to first token in seconds."
        )
        self.inter_token = Histogram(
            "vllm:inter_token_latency_seconds", _SECONDS, "Inter-token latency in seconds."
        )
        self.queue = Histogram(
            "vllm:request_queue_time_seconds", _SECONDS, "Time spent waiting, in seconds."
        )
        self.prefill = Histogram(
            "vllm:request_prefill_time_seconds", _SECONDS, "Time spent in prefill, in seconds."
        )
        self.end_to_end = Histogram(
            "vllm:e2e_request_latency_seconds", _SECONDS, "End to end latency in seconds."
        )
        self.prompt = Histogram("vllm:request_prompt_tokens", _TOKENS, "Prompt tokens.")
        self.generation = Histogram("vllm:request_generation_tokens", _TOKENS, "Generated tokens.")
        self._histograms = (
            self.first_token,
            self.inter_token,
            self.queue,
            self.prefill,
            self.end_to_end,
            self.prompt,
            self.generation,
        )

    def finished(self, job: Job) -> None:
        """Counts a job that ran to its end."""
        started, prefilled, ended = job.started_s, job.prefilled_s, job.ended_s
        assert started is not None
        assert prefilled is not None
        assert ended is not None
        self.first_token.observe(prefilled - job.submitted_s)
        self.queue.observe(started - job.submitted_s)
        self.prefill.observe(prefilled - started)
        self.end_to_end.observe(ended - job.submitted_s)
        if job.output_tokens > 1:
            self.inter_token.observe(job.token_delay_s, job.output_tokens - 1)
        self.prompt.observe(job.prompt_tokens)
        self.generation.observe(job.output_tokens)

    def render(self, model: PodModel) -> bytes:
        """The whole page."""
        counters, figures = model.counters, model.figures
        lines = _metric(
            "process_start_time_seconds",
            "gauge",
            "Start time of the process since unix epoch.",
            {"": self.started_s},
        )
        for name, text, gauge in (
            ("vllm:num_requests_running", "Requests in execution batches.", model.running),
            ("vllm:num_requests_waiting", "Requests waiting to be processed.", model.waiting),
            ("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent.", model.kv_usage),
        ):
            lines += _metric(name, "gauge", text, {self.labels: gauge})
        for name, text, total in (
            ("vllm:prefix_cache_queries_total", "Queried tokens.", counters.prompt_tokens),
            ("vllm:prefix_cache_hits_total", "Cached tokens.", counters.cached_tokens),
            ("vllm:prompt_tokens_total", "Prefill tokens.", counters.prompt_tokens),
            ("vllm:prompt_tokens_cached_total", "Cached tokens.", counters.cached_tokens),
            ("vllm:generation_tokens_total", "Generation tokens.", counters.output_tokens),
        ):
            lines += _metric(name, "counter", text, {self.labels: total})
        sources = {
            "local_compute": counters.computed_tokens,
            "local_cache_hit": counters.cached_tokens,
            "external_kv_transfer": counters.external_tokens,
        }
        name, text = "vllm:prompt_tokens_by_source_total", "Prompt tokens by source."
        lines += _metric(name, "counter", text, self._by("source", sources))
        ends = {"length": counters.finished, "abort": counters.cancelled}
        name, text = "vllm:request_success_total", "Processed requests."
        lines += _metric(name, "counter", text, self._by("finished_reason", ends))
        cache = (
            f'block_size="{figures.block_size}",enable_prefix_caching="True",engine="0",'
            f'kv_cache_size_tokens="{figures.capacity_blocks * figures.block_size}",'
            f'num_gpu_blocks="{figures.capacity_blocks}"'
        )
        name, text = "vllm:cache_config_info", "Information of the LLMEngine CacheConfig"
        lines += _metric(name, "gauge", text, {cache: 1})
        for histogram in self._histograms:
            lines += histogram.lines(self.labels)
        return ("\n".join(lines) + "\n").encode()

    def _by(self, label: str, values: dict[str, int]) -> dict[str, float]:
        return {f'{self.labels},{label}="{key}"': value for key, value in values.items()}


def _metric(name: str, kind: str, text: str, values: Mapping[str, float]) -> list[str]:
    """The exposition of one metric; `values` by their labels."""
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    for labels, value in values.items():
        lines.append(f"{name}{{{labels}}} {float(value)}" if labels else f"{name} {value}")
    return lines
