"""Counters, gauges and histograms of a server, as Prometheus metrics.

Names are vLLM's where it has one, with the prefix ``mmserve:``; the others are specific to diffusion models. Every
server has its own registry. Outcomes of requests are recorded as they end (``watch.py``); the state of engines is read
at each scrape (``_Held``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from mmserve.core.events import Finished
from mmserve.core.stats import Stats
from mmserve.observe.aliases import also_under
from mmserve.observe.counters import SessionMetrics, TenantMetrics
from mmserve.observe.inventory import MODEL, PREFIX, Calls, Described, Models, Unasked, add_build, family
from mmserve.observe.labelled import Labelled

#: Upper bounds of histogram buckets: seconds of a request or a stage, seconds between tokens, and numbers of tokens.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
_BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 40)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_PER_FORWARD = (0.1, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


class Measured(Described, Protocol):
    """An engine with readable statistics."""

    def stats(self) -> Stats:
        """Its present state and its counts since the start."""
        ...


class Metrics:
    """The metrics of one server over its ``engines`` (model name → engine).

    ``served`` is the registry to serve: all of ``registry``, and mmserve's metrics repeated under other
    ``prefixes``.
    """

    def __init__(self, engines: Mapping[str, Measured], prefixes: Sequence[str] = ()) -> None:
        self.registry = CollectorRegistry()
        self.served = also_under(self.registry, prefixes)
        ProcessCollector(registry=self.registry)
        add_build(self.registry)
        self.registry.register(Models(engines))
        self.registry.register(_Held(engines))
        self.calls = Calls(self.registry)
        timed = self._histograms(
            _SECONDS,
            time_to_first_token_seconds="From arrival to the first final text, a sample",
            time_to_first_draft_seconds="From arrival to the first candidates for the answer, which may yet change",
            time_to_first_commit_seconds="From arrival to the first final position of the answer, wherever it is",
            e2e_request_latency_seconds="From arrival to the end, a sample",
            request_queue_time_seconds="Waiting before and between stages",
            request_encode_time_seconds="In encode: media to visual tokens",
            request_prefill_time_seconds="In prefill",
            request_decode_time_seconds="In decode",
        )
        self._first, self._draft, self._commit, self._whole, *of_stages = timed
        self._queue, self._encode, self._prefill, self._decode = of_stages
        self._between, self._per_token = self._histograms(
            _BETWEEN,
            inter_token_latency_seconds="Between two pieces of final text of a sample, each of one token or of several",
            request_time_per_output_token_seconds="From the first final text to the end, over all tokens but one",
        )
        self._prompt, self._generated, self._longest = self._histograms(
            _TOKENS,
            request_prompt_tokens="Tokens of a prompt, its visual ones among them",
            request_generation_tokens="Tokens of a sample's answer",
            request_max_num_generation_tokens="Tokens of the longest answer of a request",
        )
        [self._per_forward] = self._histograms(_PER_FORWARD, tokens_per_forward="Tokens of an answer a forward pass")
        self._counted = self._counters(
            prompt_tokens="Tokens of prompts, a sample",
            generation_tokens="Tokens of answers",
            visual_tokens="Visual tokens of prompts, as they were left",
            pruned_visual_tokens="Visual tokens that were pruned",
            cached_prompt_tokens="Tokens of prompts that a shared prefix spared",
            reused_prompt_tokens="Tokens of prompts whose K/V were taken from a pass over an image alone",
            forwards="Forward passes that requests took part in",
            recomputed_tokens="Token positions that were run through the model",
        )
        self._ended = self._counter("request_success", "Samples that ended", "finished_reason")
        self._messages = Labelled(
            Counter(PREFIX + "messages_refused", "Messages that were refused unread", ("code",), registry=self.registry)
        )
        self._failed = self._counter("request_failure", "Requests that were refused, failed or were cancelled", "code")
        self.tenants = TenantMetrics(self.registry)
        self.sessions = SessionMetrics(self.registry)

    def message_refused(self, code: str) -> None:
        """Count a message rejected before it became a request: malformed, too large or too slow."""
        self._messages.of(code).inc()

    def failed(self, model: str, code: str) -> None:
        """Count a request of ``model`` that failed with the error code ``code``."""
        self._failed.of(model, code).inc()

    def between(self, model: str, seconds: float) -> None:
        """Record the time in seconds between two pieces of final text."""
        self._between.of(model).observe(seconds)

    def answered(self, model: str, longest: int) -> None:
        """Record a request all of whose samples finished; ``longest``: tokens of the longest sample."""
        self._longest.of(model).observe(longest)

    def finished(self, model: str, event: Finished) -> None:
        """Record the outcome of a sample."""
        times, usage = event.times, event.usage
        tokens = usage.completion_tokens
        for histogram, milliseconds in (
            (self._first, times.first_token),
            (self._draft, times.first_draft),
            (self._commit, times.first_commit),
            (self._whole, times.total),
            (self._queue, times.queue),
            (self._encode, times.encode),
            (self._prefill, times.prefill),
            (self._decode, times.decode),
        ):
            histogram.of(model).observe(milliseconds / 1e3)
        if tokens > 1:
            self._per_token.of(model).observe((times.total - times.first_token) / 1e3 / (tokens - 1))
        self._prompt.of(model).observe(usage.prompt_tokens)
        self._generated.of(model).observe(tokens)
        self._per_forward.of(model).observe(event.tokens_per_forward)
        for name, count in (
            ("prompt_tokens", usage.prompt_tokens),
            ("generation_tokens", tokens),
            ("visual_tokens", usage.visual_tokens),
            ("pruned_visual_tokens", max(0, usage.visual_tokens_before - usage.visual_tokens)),
            ("cached_prompt_tokens", usage.cached_tokens),
            ("reused_prompt_tokens", usage.reused_tokens),
            ("forwards", event.forwards),
            ("recomputed_tokens", event.recomputed_tokens),
        ):
            self._counted[name].of(model).inc(count)
        self._ended.of(model, event.reason).inc()

    def _histograms(self, buckets: tuple[float, ...], **named: str) -> list[Labelled[Histogram]]:
        return [
            Labelled(Histogram(PREFIX + name, text, (MODEL,), buckets=buckets, registry=self.registry))
            for name, text in named.items()
        ]

    def _counters(self, **named: str) -> dict[str, Labelled[Counter]]:
        return {name: self._counter(name, text) for name, text in named.items()}

    def _counter(self, name: str, text: str, *labels: str) -> Labelled[Counter]:
        return Labelled(Counter(PREFIX + name, text, (MODEL, *labels), registry=self.registry))


class _Held(Unasked):
    """State and counts of engines, read at each scrape."""

    def __init__(self, engines: Mapping[str, Measured]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """The metric families, with one sample a model."""
        stats = {name: engine.stats() for name, engine in self._engines.items()}
        gauges = {
            "num_requests_running": ("Samples that hold a place in a stage", lambda s: s.live - s.queued),
            "num_requests_waiting": ("Samples that wait to start", lambda s: s.queued),
            "kv_cache_usage_perc": ("Share of K/V pages in use", lambda s: s.pages_in_use / max(1, s.pages)),
            "expected_wait_seconds": ("Seconds that a new request would wait to start", lambda s: s.expected_wait),
            "kv_cache_pages_shared": ("K/V pages published for later requests", lambda s: s.cached_pages),
        }
        counters = {
            "prefix_cache_queries": ("Pages of prompts that were looked for", lambda s: s.prefix_lookups),
            "prefix_cache_hits": ("Those of them that were found", lambda s: s.prefix_hits),
            "requests_shed": ("Requests refused because they would have waited too long", lambda s: s.shed),
            "constraint_steps": ("Steps of constrained requests that ended", lambda s: s.constraint_steps),
            "constraint_fallback": ("Those that kept the answer known before", lambda s: s.constraint_fallbacks),
            "constraint_late": ("Those of these that had no time left", lambda s: s.constraint_late),
        }
        for families, kind in ((gauges, GaugeMetricFamily), (counters, CounterMetricFamily)):
            for name, (text, value) in families.items():
                yield family(kind, name, text, (MODEL,), (((model,), value(own)) for model, own in stats.items()))
        stages = (((model, at), count) for model, own in stats.items() for at, count in own.stages.items())
        yield family(GaugeMetricFamily, "num_requests_stage", "Samples by stage", (MODEL, "stage"), stages)
        if stats:  # empty while all models are loading
            yield from _of_caches(next(iter(stats.values())))


def _of_caches(stats: Stats) -> Iterator[Metric]:
    """Metrics of the caches shared by all engines of a server."""
    caches = {"tokens": stats.token_cache, "pixels": stats.pixel_cache, "kv": stats.kv_cache}
    for kind, name, text, value in (
        (CounterMetricFamily, "mm_cache_queries", "Media that were looked for in a cache", lambda c: c.lookups),
        (CounterMetricFamily, "mm_cache_hits", "Those of them that were found", lambda c: c.found),
        (CounterMetricFamily, "mm_cache_evictions", "Values that had to go", lambda c: c.evicted),
        (GaugeMetricFamily, "mm_cache_bytes", "Bytes of values in memory", lambda c: c.used_bytes),
        (GaugeMetricFamily, "mm_cache_disk_bytes", "Bytes of values on disk", lambda c: c.disk_bytes),
    ):
        yield family(kind, name, text, ("cache",), (((of,), value(cache)) for of, cache in caches.items()))
    pages = stats.prefix_cache
    hits = (("host",), pages.hits), (("disk",), pages.disk_hits)
    text = "Pages of prompts that were found beyond the page pool"
    yield family(CounterMetricFamily, "prefix_tier_hits", text, ("tier",), hits)
    missed, text = pages.lookups - pages.hits - pages.disk_hits, "Pages of prompts that were found in no tier"
    yield family(CounterMetricFamily, "prefix_tier_misses", text, (), [((), missed)])
    sizes = (("host",), pages.used_bytes), (("disk",), pages.disk_bytes)
    text = "Bytes of pages beyond the page pool"
    yield family(GaugeMetricFamily, "prefix_tier_bytes", text, ("tier",), sizes)
