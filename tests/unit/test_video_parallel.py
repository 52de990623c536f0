"""Long videos: keyframe-aligned runs in several threads give the same frames, and an index that holds no packets."""

from __future__ import annotations

import io
import sys
import threading
import time
import tracemalloc
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from clips import clip

from mmserve.config import MediaConfig
from mmserve.encode import frames, video
from mmserve.encode.containers import file_demuxer
from mmserve.encode.decoding import Budget, DecodePool, _Reservation
from mmserve.encode.frames import opened
from mmserve.encode.video import read_video
from mmserve.encode.wire import MediaFile
from mmserve.errors import InvalidArgument, ResourceExhausted

SHAPES = {
    "closed groups": clip(gop=8),
    "open groups": clip(gop=8, **{"x264-params": "open-gop=1"}),
    "keyframes that are none": clip(gop=8, **{"x264-params": "intra-refresh=1"}),
    "a keyframe each": clip(gop=1),
    "Matroska": clip("matroska", gop=5),
    "no times": clip("avi", gop=8),
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many threads decode each file, where everything is worth several."""
    found: list[int] = []
    real = frames.VideoFile._threads
    monkeypatch.setattr(frames, "PARALLEL_PIXELS", 0)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr(frames.VideoFile, "_threads", lambda self, runs: found.append(n := real(self, runs)) or n)
    return found


@pytest.mark.parametrize("count", [2, 7, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_frames_as_in_order(shape: str, count: int, threads: list[int]) -> None:
    data = SHAPES[shape]
    alone, several = (list(read_video(data, MediaConfig(decode_threads=most), frames=count)) for most in (1, 3))
    assert threads == [1, 1 if shape == "no times" else min(3, count)] or (count == 40 and threads == [1, 3])
    assert [seconds for seconds, _image in several] == [seconds for seconds, _image in alone]
    assert all(np.array_equal(a, b) for (_s, a), (_t, b) in zip(several, alone, strict=True))
    assert not [thread for thread in threading.enumerate() if "work" in thread.name]


class Impatient:
    """Wants no more after some frames, in whichever thread that is."""

    def __init__(self) -> None:
        self.checks = 0

    def reserve(self, pixels: int) -> None:
        return

    def check(self) -> None:
        self.checks += 1
        if self.checks > 12:
            raise InvalidArgument.of("video", "is not wanted any more")


def test_all_threads_end_with_one(threads: list[int]) -> None:
    watch = Impatient()
    with pytest.raises(InvalidArgument, match="not wanted any more"):
        list(read_video(SHAPES["closed groups"], MediaConfig(decode_threads=3), frames=40, watch=watch))
    assert threads == [3] and watch.checks <= 12 + 3
    assert not [thread for thread in threading.enumerate() if "work" in thread.name]


def test_threads_end_where_nobody_takes_their_frames(threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmserve.encode.parallel._AHEAD_PIXELS", 0)
    reading = read_video(SHAPES["a keyframe each"], MediaConfig(decode_threads=3), frames=40)
    with closing(reading):  # type: ignore[type-var]
        next(reading)
    assert threads == [3] and not [thread for thread in threading.enumerate() if "work" in thread.name]


def test_short_videos_take_one_thread() -> None:
    data = SHAPES["closed groups"]
    with opened(data, "mov", MediaConfig(), "video") as opened_video:
        assert opened_video._threads(opened_video.index.runs(range(40))) == 1


def test_a_process_decodes_a_long_video_in_several_threads() -> None:
    data = still_life("mp4", 130, "libx264", (1280, 720), g="13", preset="ultrafast")
    limits = MediaConfig(max_video_seconds=240)
    with opened(data, "mov", limits, "video") as opened_video:
        wanted = video.spread(opened_video.index.times, opened_video.index.end, 40)
        assert opened_video.index.decoded(opened_video.index.runs(wanted)) * 1280 * 720 > frames.PARALLEL_PIXELS
        expected = [time for time, _image in opened_video.sequence(wanted[:8], video.UNWATCHED)]
        shown = [round(opened_video.at(time), 3) for time in expected]
    with closing(DecodePool(limits)) as pool:
        file = MediaFile(data, True, "video", 40, resize=(16, 9, 0))
        [found] = pool.map([lambda decode: decode(file)], lambda: None)
    assert len(found.frames) == 40 and [round(second, 3) for second in found.seconds[:8]] == shown
    assert list(found.seconds) == sorted(found.seconds)


def still_life(kind: str, count: int, codec: str = "mpeg4", size: tuple[int, int] = (16, 16), **options: str) -> bytes:
    """A file of so many black frames, one a second."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream: Any = container.add_stream(codec, rate=1, options={"g": "250", **options})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((size[1], size[0], 3), dtype=np.uint8), format="rgb24")
        for second in range(count):
            frame.pts, frame.time_base = second, Fraction(1)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux lists them")
def test_a_file_that_turns_out_larger_waits_for_none_that_waits_for_it() -> None:
    limits, until = MediaConfig(decode_bytes=400), time.monotonic() + 10

    def check() -> None:
        assert time.monotonic() < until, "each waits for the other"

    budget = Budget(limits.decode_bytes)
    small, other, large = (_Reservation(budget, limits, check) for _ in range(3))
    small.reserve(50)
    other.reserve(25)
    waiting = threading.Thread(target=large.reserve, args=(90,))
    waiting.start()
    try:
        while not budget._waiting:
            time.sleep(0.001)
        small.reserve(10)
        with pytest.raises(ResourceExhausted, match="too many media"):
            small.reserve(20)
        assert budget.used == 340
    finally:
        small.shrink_to(0)
        other.shrink_to(0)
        waiting.join()
    assert budget.used == 360 and large.bytes == 360


def test_pictures_leave_no_threads() -> None:
    """Each picture had two for its conversion, until it was collected."""
    usual = len(list(Path("/proc/self/task").iterdir()))
    for _second, _image in read_video(clip(size=(640, 480)), MediaConfig(decode_threads=1), frames=40):
        assert len(list(Path("/proc/self/task").iterdir())) <= usual


@pytest.mark.parametrize("kind", ["mp4", "matroska"])
def test_what_is_held_of_a_file_does_not_grow_with_its_packets(kind: str) -> None:
    """Ten minutes, and ten times as many: some bytes a frame, where a packet takes several hundred."""
    held = []
    for count in (600, 6000):
        data = still_life(kind, count)
        tracemalloc.start()
        try:
            demuxer = file_demuxer(data)
            assert demuxer is not None
            with opened(data, demuxer, MediaConfig(max_video_seconds=1e6), "video") as opened_video:
                before = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                list(opened_video.sequence(range(0, count, count // 4), video.UNWATCHED))
                held.append(tracemalloc.get_traced_memory()[1] - before)
                size = opened_video.index.times.itemsize * len(opened_video.index.times)  # type: ignore[attr-defined]
                assert size == 8 * count
        finally:
            tracemalloc.stop()
    assert held[1] < held[0] + 100_000
