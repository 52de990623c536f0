"""Benchmarks of servers that answer nothing, or end: no figure without a sample, and no goal that is met by it."""

from __future__ import annotations

import argparse
import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mmserve.bench import attacks, cluster_coded, cluster_kills, load, video_alerts, video_sessions
from mmserve.bench.attacks import Seen
from mmserve.bench.in_process import Answer
from mmserve.bench.served import ANNOUNCED

IDLE = Seen(texts=[100.0] * 5, checks=[10.0] * 5)
WELL = {"memory_mib": [500, 600, 500], "attack_went_on": True, "server_went_on": True}


def measured(seen: Seen, **more: Any) -> dict[str, bool]:
    row = {**attacks._row("flood", IDLE, seen), **WELL, **more}
    return {measure["name"].removeprefix("flood: "): measure["met"] for measure in attacks._measures(row)}


def test_an_attack_without_effect_meets_every_goal() -> None:
    assert all(measured(IDLE).values())


def test_requests_that_are_not_answered_have_no_latency_and_miss_their_goal() -> None:
    seen = Seen(checks=[10.0], failures=["UNAVAILABLE"])
    row = attacks._row("flood", IDLE, seen)
    assert row["text_ms_p50"] == row["text_ms_p99"] == [100.0, None]
    found = measured(seen)
    assert not found["text p99 over idle"] and not found["requests and health checks that failed"]
    assert found["slowest health check"]


@pytest.mark.parametrize(
    ("ended", "missed"),
    [
        (
            {"server_went_on": False, "memory_mib": [500, 0, 0]},
            {"memory after over before", "server or attacker that ended"},
        ),
        ({"attack_went_on": False}, {"server or attacker that ended"}),
    ],
)
def test_a_server_or_an_attacker_that_ends_misses_a_goal(ended: dict[str, Any], missed: set[str]) -> None:
    assert {name for name, met in measured(IDLE, **ended).items() if not met} == missed


@pytest.mark.parametrize("more", ["", ", and over HTTP on 127.0.0.1:81"])
def test_the_address_of_a_server_is_that_of_grpc(more: str) -> None:
    found = ANNOUNCED.match(f"mmserve serves bundled, bundled-causal on 127.0.0.1:80{more}")
    assert found is not None and found[1] == "127.0.0.1:80"


def test_memory_is_the_median_of_several_readings() -> None:
    mib = 1 << 20
    found = attacks._memory([[500 * mib, 900 * mib, 510 * mib], [0, 0, 0], [700 * mib]])
    assert found == {"memory_mib": [510, 0, 700], "memory_mib_range": [[500, 900], [0, 0], [700, 700]]}


def test_a_load_without_answers_has_no_latency_and_no_accuracy() -> None:
    row = load._row(load.Outcome(failures=["UNAVAILABLE"]), 1, 1, 1.0, 0.0)
    assert row["latency_ms_p50"] is row["latency_ms_p99"] is row["accuracy"] is None and row["failed"] == 1


def test_sessions_without_frames_or_answers_have_no_times() -> None:
    report = video_sessions._report(video_sessions.Seen(asked=["?"]), video_sessions.Bytes(), [], 60.0)
    [row] = report["rows"]
    assert row["frame_to_ready_s"] == row["question_to_first_token_ms"] == [None, None]
    assert [m["name"] for m in report["measures"] if m["met"]] == ["sessions that failed"]


def test_events_without_an_alert_count_in_the_percentile_of_those_with_one() -> None:
    assert video_alerts._late([0.5] * 99, 0) == video_alerts._late([0.5] * 99, 1) == 0.5
    assert video_alerts._late([0.5] * 9, 1) == float("inf") and video_alerts._late([], 0) is None


def test_answers_before_the_last_kill_are_judged_too() -> None:
    def answers(ended: bool) -> list[Answer]:
        made = [Answer(), Answer()]
        for each in made[: 2 if ended else 1]:
            each.over.set()
        return made

    rounds = [answers(True), answers(True), answers(True)]
    left, kills = iter(rounds), iter([1, 2, 3])
    assert cluster_kills._asked_until(lambda: next(kills) >= 3, lambda: next(left)) == [a for r in rounds for a in r]
    [lost] = [answers(False)]
    assert cluster_kills._asked_until(lambda: False, lambda: lost) == lost  # not asked again


def test_equal_answers_of_unchanged_kv_are_those_of_two_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()

    class Done:
        def __init__(self, token: int) -> None:
            self._token = SimpleNamespace(id=token, log_probability=0.0)

        def handed_on(self) -> Done:
            return self

        def answered(self) -> SimpleNamespace:
            return SimpleNamespace(text="", tokens=[self._token])

    def decode(_engine: object, _left: object, _bits: int, of: Any, *_name: str) -> Done:
        of.bytes += 1
        return Done(next(numbers))  # another answer each time

    for name, value in {
        "_MODELS": {"bundled": "none"},
        "_QUESTIONS": 1,
        "TASKS": {"arithmetic": "text"},
        "build_engines": lambda _config: {"bundled": object()},
        "started": lambda *_: nullcontext(),
        "_prefill": lambda *_: Done(0),
        "_decode": decode,
    }.items():
        monkeypatch.setattr(cluster_coded, name, value)
    report = cluster_coded.run(argparse.Namespace(repeats=1), lambda _text: None)
    [same] = [m for m in report["measures"] if m["name"] == "bundled, as they are, same answers twice"]
    assert not same["met"]
