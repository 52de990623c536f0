"""The benchmark of streams: its clips, its figures, and one small round of its accuracy."""

from __future__ import annotations

import argparse
import random
import socket
from itertools import pairwise
from pathlib import Path

import pytest

from mmserve.bench import video_accuracy, video_files
from mmserve.bench.measures import (
    as_text,
    at_least,
    at_most,
    figure,
    in_turns,
    percentile,
    share_by_task,
    stated,
    times_others,
)
from mmserve.bench.video import plot, run
from mmserve.bench.video_clips import clips_of, drawn_clip, frame_at
from mmserve.bench.video_cuts import CutProxy
from mmserve.bench.video_sessions import growth
from mmserve.bench.video_watches import holds, names, watches
from mmserve.calibrate.fit import calibration_error
from mmserve.errors import ConfigError
from mmserve.video.clock import CYCLE, moments


def test_measures_are_met_or_not_or_only_stated() -> None:
    assert at_most("a", 2.0, "ms", 3.0) == {"name": "a", "value": 2.0, "unit": "ms", "goal": "<= 3", "met": True}
    assert at_least("a", 2.0, "x", 3.0)["met"] is False
    assert stated("a", 2.0, "1/h")["met"] is None
    for nothing in (None, float("inf")):
        found = at_most("a", nothing, "ms", 3.0)
        assert found["value"] is None and found["met"] is False
        assert as_text(found) == "a: no sample (goal <= 3, missed)"
    assert at_least("a", None, "x", 0.0)["met"] is False and stated("a", None, "x")["value"] is None


def test_a_percentile_is_the_smallest_value_that_its_share_does_not_exceed() -> None:
    hundred = [float(i) for i in range(1, 101)]
    assert [percentile(hundred, share) for share in (0.07, 0.5, 0.99, 1.0)] == [7, 50, 99, 100]
    assert percentile([1.0], 0.5) == percentile([1.0, 2.0], 0.5) == percentile([1.0, 2.0], 0.0) == 1.0
    assert figure([], max) is None and figure([1.26], max, 1) == 1.3


def test_calibration_error_is_the_gap_between_confidence_and_being_right() -> None:
    assert calibration_error([(1.0, 0.0)] * 4, [0, 0, 0, 1], bins=20) == pytest.approx(0.25)
    assert calibration_error([(0.75, 0.25)] * 4, [0, 0, 0, 1], bins=20) == pytest.approx(0)
    assert calibration_error([(0.0, 1.0)], [1], bins=20) == pytest.approx(0)  # a sure "no" is right, too


def test_memory_that_grows_is_seen_after_the_warm_up_only() -> None:
    seconds = [float(i) for i in range(120)]
    early = [100 + min(i, 50) for i in range(120)]
    late = [100 + i for i in range(120)]
    assert growth(early, seconds, 60) == 0
    assert growth(late, seconds, 60) > 0.2
    assert growth([200 - i for i in late], seconds, 60) > 0.2
    assert growth([], [], 60) is growth([0, 0, 5], [0.0, 60.0, 61.0], 60) is None
    assert growth([0, 0, 0], [0.0, 60.0, 61.0], 60) == 0


def test_clips_of_a_stream_follow_each_other_and_their_moments_are_labels() -> None:
    clips = clips_of(3, 100)
    assert clips[0].begin == 0 and clips[-1].end >= 100
    assert all(a.end == b.begin for a, b in pairwise(clips))
    shown = next(s for s in clips if s.clip.kind == "appears" and s.begin % CYCLE)
    asked = [q for n in range(9) for q in shown.questions(random.Random(n)) if q.task == "when"]
    actual = {actor.appears for actor in shown.clip.actors if actor.appears}
    found = {m.seconds for q in asked for m in moments(q.answer, shown.begin, shown.end - 0.5)}
    assert found and {second - shown.begin for second in found if second is not None} <= actual
    assert frame_at(clips, shown.begin).size == (144, 144)


def test_there_are_32_different_watches_whose_truth_follows_the_clip() -> None:
    asked = watches()
    assert len({question.text for _name, question in asked}) == len(asked) == 32
    clip = next(c for c in map(drawn_clip, range(50)) if c.kind == "appears" and not c.actors[0].appears)
    shape = clip.actors[0].shape
    assert holds(clip, 0.5, (shape.color, shape.kind))
    assert holds(clip, 0.5, (shape.color, None)) and holds(clip, 0.5, (None, shape.kind))
    assert not all(holds(clip, 0.5, name) for name in names())


def test_a_cut_proxy_forwards_until_it_cuts() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, CutProxy(f"127.0.0.1:{listener.getsockname()[1]}") as proxy:
        host, port = proxy.address.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as near:
            far, _address = listener.accept()
            with far:
                far.settimeout(10)
                near.sendall(b"question")
                assert far.recv(100) == b"question"
                far.sendall(b"answer")
                assert near.recv(100) == b"answer"
                proxy.cut()
                assert near.recv(100) == far.recv(100) == b""
        assert proxy.cuts == 1


@pytest.mark.slow  # 10 s: it loads a model and plays streams through an engine
def test_a_small_round_of_accuracy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(video_accuracy, "FRAMES", 8)
    monkeypatch.setattr(video_accuracy, "WHOLE_FRAMES", 8)
    monkeypatch.setattr(video_accuracy, "ASKED_SECONDS", 8)
    monkeypatch.setattr(video_accuracy, "AGO", 6)
    monkeypatch.setattr(video_accuracy, "LONG", video_accuracy.LONG[:1])
    out = tmp_path / "plot.png"
    arguments = argparse.Namespace(tasks="accuracy", model=None, limit=1, seed=0, plot=out)
    found = run(arguments, lambda _text: None)
    assert [row["measured"] for row in found["rows"]][:2] == ["accuracy: last clip", "accuracy: 6 s ago"]
    assert all(row["n"] > 0 for row in found["rows"])
    assert len(found["measures"]) == 3
    assert all(measure["name"].startswith("accuracy: ") for measure in found["measures"])
    assert out.stat().st_size > 1000


def test_memory_over_time_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"measured": "sessions", "at_seconds": [0.0, 1.0], "host_mib": [300, 310], "kv_kib": [0, 1024]}
    plot([row], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_an_unknown_section_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing"):
        run(argparse.Namespace(tasks="nothing"), lambda _text: None)


def test_a_small_file_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way runs, and they give one answer; times of so little are not looked at."""
    monkeypatch.setattr(video_files, "SIZE", (64, 48))
    arguments = argparse.Namespace(tasks="files", model=None, seconds=10.0, repeats=1, plot=None)
    report = run(arguments, lambda _text: None)
    [row] = report["rows"]
    assert set(row["wall_seconds"]) == {"end to end", "one after the other", "decode", "encode", "prefill"}
    assert row["same_answer"] and 0 < row["decoded_bytes_at_most"] <= 4 * 64 * 48 * 10
    assert report["measures"][0]["name"] == "files: end to end over the dearest stage alone"


def test_rounds_begin_with_another_name_each_time() -> None:
    assert list(in_turns("abc", 2)) == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]


def test_times_over_others_are_medians_over_rounds() -> None:
    assert times_others("a", {"a": [1.0, 2.0, 9.0], "b": [2.0, 2.0, 3.0]}) == {"times_b": 1.0}
    assert share_by_task([("x", True), ("x", False), ("y", True)]) == {"x": 0.5, "y": 1.0}
