"""Metrics as a scraper reads them, against what clients were told of the same requests."""

from __future__ import annotations

import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from certificates import self_signed
from e2e_helpers import EMPTY, PATIENCE, Gates, Running, failure, gated, running, settings, wait_for
from helpers import picture
from prometheus_client.parser import text_string_to_metric_families

from mmserve.assembly import BackgroundServer
from mmserve.client import Admitted, Delta, Result
from mmserve.core.request import Stage
from mmserve.errors import ConfigError, DeadlineExceeded, InvalidArgument, NotFound

#: (name without prefix, its labels but the model's) → value.
Scrape = dict[tuple[str, tuple[tuple[str, str], ...]], float]
SECONDS = {
    "e2e_request_latency_seconds": "total",
    "time_to_first_token_seconds": "first_token",
    "request_queue_time_seconds": "queue",
    "request_encode_time_seconds": "encode",
    "request_prefill_time_seconds": "prefill",
    "request_decode_time_seconds": "decode",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def scraped() -> Iterator[Running]:
    with running(settings(server={"metrics_port": free_port()}, engine={"max_queued": 4})) as found:
        yield found


def scrape(server: Running, model: str = "bundled") -> Scrape:
    port = server.background.config.server.metrics_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
        text = answer.read().decode()
    found: Scrape = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("model_name", model) == model and "le" not in labels:
                found[sample.name.removeprefix("mmserve:"), tuple(sorted(labels.items()))] = sample.value
    return found


def grown(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    key = name, tuple(sorted(labels.items()))
    return after.get(key, 0.0) - before.get(key, 0.0)


def test_what_requests_come_to_is_counted_as_their_clients_are_told_it(scraped: Running) -> None:
    before = scrape(scraped)
    generate = scraped.client.generate
    results: list[Result] = [
        generate("What is it?", max_new_tokens=8),
        *(generate("What is it?", [picture(1)], max_new_tokens=8, recompute="dual") for _ in range(2)),
        generate("What is it?", [picture(2)], max_new_tokens=8, pruner="random", keep_ratio=0.25),
        generate("What is it?", [picture(1)], max_new_tokens=8, commit="threshold"),
        generate("What is it?", max_new_tokens=8, regex="[0-9]{2}"),
        *generate("What is it?", max_new_tokens=8, n=3, temperature=1.0).samples,
    ]
    after = scrape(scraped)
    told = {
        "prompt_tokens_total": sum(r.usage.prompt_tokens for r in results),
        "generation_tokens_total": sum(r.usage.completion_tokens for r in results),
        "visual_tokens_total": 81 + 81 + 20 + 81,
        "pruned_visual_tokens_total": 61,
        "forwards_total": sum(r.forwards for r in results),
        "recomputed_tokens_total": sum(r.recomputed_tokens for r in results),
        "request_prompt_tokens_count": len(results),
        "request_generation_tokens_sum": sum(r.usage.completion_tokens for r in results),
        "request_time_per_output_token_seconds_count": sum(r.usage.completion_tokens > 1 for r in results),
    }
    assert {name: grown(before, after, name) for name in told} == told
    for name, part in SECONDS.items():
        assert grown(before, after, f"{name}_count") == len(results)
        milliseconds = sum(getattr(r.times, part) for r in results)
        assert grown(before, after, f"{name}_sum") == pytest.approx(milliseconds / 1e3, rel=1e-6)
    for reason in ("end", "length"):
        expected = sum(r.finish_reason == reason for r in results)
        assert grown(before, after, "request_success_total", finished_reason=reason) == expected
    assert grown(before, after, "mm_cache_queries_total", cache="tokens") == 4
    assert grown(before, after, "mm_cache_hits_total", cache="tokens") == 2
    assert grown(before, after, "constraint_steps_total") == results[5].constraint.steps > 0  # type: ignore[union-attr]
    assert after["mm_cache_bytes", (("cache", "tokens"),)] > 0
    assert after["process_resident_memory_bytes", ()] > 1e8


def test_pieces_of_text_are_timed(scraped: Running) -> None:
    before = scrape(scraped)
    prompt = "Start with 12. Add 30. Take away 4. What is the result?"
    stream = scraped.client.stream(prompt, max_new_tokens=16, block_length=8, temperature=3.0, seed=5)
    pieces = sum(isinstance(event, Delta) for event in stream)
    assert grown(before, scrape(scraped), "inter_token_latency_seconds_count") == pieces - 1 > 0


def test_requests_without_an_answer_are_counted_by_their_code(
    scraped: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, client = scrape(scraped), scraped.client
    with pytest.raises(InvalidArgument):
        client.generate("?", temperature=-1.0)
    with pytest.raises(NotFound):
        client.generate("?", model="of another name")
    with gated(scraped.engine, monkeypatch) as gates:
        leaves(scraped, gates)
        late = scraped.ask("late", max_new_tokens=4)
        scraped.reach("late", Stage.ENCODING)
        [record] = scraped.engine._live.by_id.values()
        record.request = replace(record.request, deadline=time.monotonic())
        scraped.engine.cancel("nobody")  # wakes the engine, which looks at deadlines then
        assert isinstance(failure(late), DeadlineExceeded)
        waiting = [scraped.ask(f"{i}", max_new_tokens=4) for i in range(8)]  # who is refused asks again

        def refusals() -> float:
            return grown(before, scrape(scraped), "request_failure_total", code="RESOURCE_EXHAUSTED")

        wait_for("a full queue", refusals)
        gates.open()
        assert all(asked.result().forwards for asked in waiting)
    wait_for("every call's end", lambda: scraped.engine.stats() == EMPTY)
    after = scrape(scraped)
    assert grown(before, after, "request_failure_total", code="INVALID_ARGUMENT") == 1
    assert grown(before, after, "request_failure_total", code="CANCELLED") == 1
    assert grown(before, after, "request_failure_total", code="DEADLINE_EXCEEDED") == 1
    unnamed = scrape(scraped, model="")
    assert unnamed["request_failure_total", (("code", "NOT_FOUND"),)] == 1, "a client's word is no label"
    assert grown(before, after, "e2e_request_latency_seconds_count") == len(waiting)


def leaves(scraped: Running, gates: Gates) -> None:
    """A client goes away while its request is decoded; gauges tell what is held meanwhile."""
    gates.decode.close()
    stream = scraped.client.stream("?", max_new_tokens=24)
    assert isinstance(next(stream), Admitted)
    wait_for("a decode batch", lambda: gates.decode.waiting)
    held = scrape(scraped)
    assert held["num_requests_running", ()] == 1 and held["num_requests_waiting", ()] == 0
    stats = scraped.engine.stats()
    assert held["kv_cache_usage_perc", ()] == pytest.approx(stats.pages_in_use / stats.pages) and stats.pages_in_use
    stream.close()
    gates.open()
    wait_for("an empty engine", lambda: scraped.engine.stats() == EMPTY)
    left = scrape(scraped)
    assert [left[name, ()] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")] == [
        0
    ] * 3
    gates.encode.close()


def test_the_port_is_the_servers_as_long_as_it_serves() -> None:
    port = free_port()
    with BackgroundServer(settings(server={"metrics_port": port})):
        second = BackgroundServer(settings(server={"metrics_port": port}))
        with pytest.raises(ConfigError, match=r"another program uses the port.*server\.metrics_port=N"), second:
            pass
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


@pytest.mark.parametrize("silent", [0, 3, 40])
def test_metrics_are_read_over_tls_whoever_else_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    monkeypatch.setattr("mmserve.observe.endpoint._PATIENCE", 0.5 if silent > 32 else PATIENCE)
    certificate, key = self_signed(tmp_path, "server")
    keys: dict[str, Any] = {"tls_certificate": str(certificate), "tls_key": str(key), "metrics_port": free_port()}
    with BackgroundServer(settings(server=keys)):
        trusting = ssl.create_default_context(cafile=str(certificate))
        url = f"https://127.0.0.1:{keys['metrics_port']}/metrics"
        others = [socket.create_connection(("127.0.0.1", keys["metrics_port"])) for _ in range(silent)]

        def read() -> bool:
            try:
                with urllib.request.urlopen(url, timeout=PATIENCE, context=trusting) as answer:
                    return b"mmserve:num_requests_running" in answer.read()
            except OSError:  # more than there are places for are sent away
                return False

        assert read() or silent > 32
        wait_for("the silent ones' time to pass", read)
        for other in others:
            other.close()
