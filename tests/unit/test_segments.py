"""Pushed segments to frames: the same as of the whole file, and typed errors for what cannot be read."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from itertools import pairwise
from typing import Any

import av
import numpy as np
import pytest
from clips import SIZE, all_frames, clip, silence
from helpers import picture
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmserve.config import MediaConfig
from mmserve.encode.decoders import Decoders, InPlace
from mmserve.encode.decoding import DecodePool
from mmserve.encode.sampling import FixedRate, Sampled, Sampler
from mmserve.encode.segments import Read, Segment, collected, decode_segment, read_segment
from mmserve.errors import InvalidArgument

LIMITS = MediaConfig()
FIELD = "segments[3]"
KINDS = ["mp4", "fragments", "mpegts", "h264", "matroska"]


def go_on() -> None:
    return


def read(segments: Sequence[Segment], sampler: Sampler, begin: float = 0.0) -> tuple[list[Sampled], float]:
    """The frames of segments that follow one another."""
    frames: list[Sampled] = []
    for segment in segments:
        begin = begin if segment.start is None else segment.start
        found, begin = collected(read_segment(segment, LIMITS, begin=begin, sampler=sampler))
        frames += found
    return frames, begin


def refused(segment: Segment, limits: MediaConfig = LIMITS, rate: float = 1000.0) -> str:
    with pytest.raises(InvalidArgument) as raised:
        collected(read_segment(segment, limits, begin=5.0, sampler=FixedRate(rate), field=FIELD))
    (violation,) = raised.value.violations
    assert violation.field == FIELD
    return violation.description


@cache
def whole(gop: int = 8) -> bytes:
    """40 frames of four seconds whose groups of pictures refer to none but themselves."""
    return clip(gop=gop)


def written(packets: Sequence[av.Packet], template: Any, kind: str, **options: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=kind, options=options) as container:
        stream = container.add_stream_from_template(template)
        for packet in packets:
            packet.stream = stream
            container.mux(packet)
    return file.getvalue()


def cut(data: bytes, kind: str, cuts: Sequence[int]) -> list[Segment]:
    """A file in segments of one kind; ``cuts``: which of its keyframes but the first begin one."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        groups: list[list[av.Packet]] = []
        for packet in container.demux(stream):
            if packet.size:
                if packet.is_keyframe:
                    groups.append([])
                groups[-1].append(packet)
        borders = [0, *sorted(set(cuts) & set(range(1, len(groups)))), len(groups)]
        parts = [[packet for group in groups[a:b] for packet in group] for a, b in pairwise(borders)]
        if kind != "fragments":
            return [Segment(written(part, stream, kind)) for part in parts]
        flags = "frag_custom+empty_moov+default_base_moof"
        segments = []
        for part in parts:
            file = written(part, stream, "mp4", movflags=flags)
            border = file.index(b"moof") - 4
            segments.append(Segment(file[border:], file[:border]))
        return segments


@cache
def of_kind(kind: str, gop: int = 8) -> Segment:
    [segment] = cut(whole(gop), kind, [])
    return segment


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [1.0, 3.0, 10.0, 25.0])
def test_the_first_frame_at_each_moment_or_after(kind: str, rate: float) -> None:
    every = all_frames(whole())
    frames, end = read([of_kind(kind)], FixedRate(rate), begin=0.0)
    expected = sorted({-(-10 * moment // int(rate)) for moment in range(int(4 * rate))} & set(range(40)))
    assert [round(frame.seconds * 10) for frame in frames] == expected
    assert end == pytest.approx(4.0, abs=1e-3)
    for frame, number in zip(frames, expected, strict=True):
        assert frame.image.size == SIZE and np.array_equal(np.asarray(frame.image), every[number])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None)
@given(cuts=st.sets(st.integers(1, 4)), rate=st.sampled_from([0.4, 1.0, 3.0, 7.0, 10.0]))
def test_the_same_frames_however_the_stream_is_cut(kind: str, cuts: set[int], rate: float) -> None:
    expected, end = read([of_kind(kind)], FixedRate(rate))
    frames, cut_end = read(cut(whole(), kind, sorted(cuts)), FixedRate(rate))
    assert [round(f.seconds, 2) for f in frames] == [round(f.seconds, 2) for f in expected]
    assert all(np.array_equal(a.image, b.image) for a, b in zip(frames, expected, strict=True))
    assert cut_end == pytest.approx(end, abs=5e-3)


def test_segments_may_begin_anywhere_on_the_clock() -> None:
    first, second = cut(whole(20), "mp4", [1])
    frames, end = read([first, Segment(second.data, start=7.25)], FixedRate(1.0), begin=3.5)
    assert [round(frame.seconds, 6) for frame in frames] == [3.5, 4.0, 5.0, 7.25, 8.05, 9.05]
    assert end == pytest.approx(9.25)


def test_a_long_frame_is_given_once() -> None:
    data = clip("matroska", frames=4, rate=10, times=[0, 1, 35, 36], gop=1)
    frames, _end = read([Segment(data)], FixedRate(1.0))
    assert [round(frame.seconds, 6) for frame in frames] == [0.0, 3.5]


def test_h265_and_vp9() -> None:
    raw = written(_packets(hevc := clip("mp4", "libx265", **{"x265-params": "log-level=none"})), _stream(hevc), "hevc")
    for data in (raw, clip("webm", "libvpx-vp9", **{"cpu-used": "8"})):
        frames, end = read([Segment(data)], FixedRate(1.0))
        assert [round(frame.seconds) for frame in frames] == [0, 1, 2, 3] and end == pytest.approx(4.0, abs=2e-3)


def _packets(data: bytes) -> list[av.Packet]:
    with av.open(io.BytesIO(data)) as container:
        return [packet for packet in container.demux(video=0) if packet.size]


def _stream(data: bytes) -> Any:
    return av.open(io.BytesIO(data)).streams.video[0]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_image_is_always_taken(kind: str) -> None:
    file = io.BytesIO()
    Image.open(io.BytesIO(picture(0, (20, 10)))).save(file, kind)
    sampler = FixedRate(0.5)
    frames, end = read([Segment(file.getvalue()), Segment(file.getvalue(), start=2.1)], sampler, begin=1.75)
    assert [frame.seconds for frame in frames] == [1.75, 2.1] and end == 4.1
    assert frames[0].image.size == (20, 10) and frames[0].image.mode == "RGB"
    following, _end = read([of_kind("mp4")], sampler, begin=end)
    assert [round(frame.seconds, 6) for frame in following] == [4.1, 6.0, 8.0]  # the image was that of 2 s


def test_frames_before_the_first_keyframe_are_left_out_and_keep_their_time() -> None:
    """Cut at a keyframe that frames in front of it refer to (an open group of pictures)."""
    data = clip(gop=8, **{"x264-params": "open-gop=1:keyint=8:min-keyint=8:scenecut=0"})
    segments = cut(data, "matroska", [1])
    every = all_frames(data)
    frames, end = read(segments, FixedRate(10.0))
    numbers = [round(frame.seconds * 10) for frame in frames]
    missing = set(range(40)) - set(numbers)
    assert 1 <= len(missing) <= 3 and missing <= set(range(5, 9)) and numbers == sorted(numbers)
    assert end == pytest.approx(4.0, abs=2e-3)
    assert all(np.array_equal(f.image, every[n]) for f, n in zip(frames, numbers, strict=True))


def of_two_sizes() -> bytes:
    small, large = (clip(frames=8, size=size) for size in (SIZE, (96, 64)))
    return b"".join(written(_packets(data), _stream(data), "h264") for data in (small, large))


def clock_set_back() -> bytes:
    """WebM clusters after which the first come again."""
    data = written(_packets(whole()), _stream(whole()), "matroska", live="1")
    return data + data[data.index(b"\x1f\x43\xb6\x75") :]


REFUSED: dict[str, tuple[Callable[[], Segment], str]] = {
    "empty": (lambda: Segment(b""), "is empty"),
    "empty after its init": (lambda: Segment(b"", of_kind("fragments").init), "is empty"),
    "one byte": (lambda: Segment(b"\0"), "a file of unknown kind, not a readable MP4"),
    "text": (lambda: Segment(b"no video at all\n" * 40), "not a readable"),
    "noise": (lambda: Segment(random.Random(0).randbytes(4000)), "not a readable"),
    "a playlist": (lambda: Segment(b"#EXTM3U\nhttp://localhost/a.ts\n"), "a file of unknown kind"),
    "a program stream": (lambda: Segment(clip("vob", "mpeg2video")), "a file of unknown kind"),
    "audio only": (lambda: Segment(silence()), "has no video stream"),
    "a fragment alone": (lambda: Segment(of_kind("fragments").data), "send it as init"),
    "an init alone": (lambda: Segment(of_kind("fragments").init), "damaged|no video frames"),
    "cut off MP4": (lambda: Segment(whole()[:-100]), "is cut off"),
    "cut off fragment": (lambda: Segment(of_kind("fragments").data[:-9], of_kind("fragments").init), "is cut off"),
    "cut off Matroska": (lambda: Segment(of_kind("matroska").data[:-100]), "is cut off"),
    "cut off transport stream": (lambda: Segment(of_kind("mpegts").data[:-100]), "is cut off"),
    "cut off H.264": (lambda: Segment(of_kind("h264", 250).data[:-300]), "damaged"),
    "H.264 headers alone": (lambda: Segment(of_kind("h264").data[:40]), "damaged|no video|no readable size"),
    "start codes before noise": (lambda: Segment(b"\0\0\0\1\x67" + random.Random(2).randbytes(900)), ""),
    "no keyframe first": (lambda: Segment(written(_packets(whole())[3:], _stream(whole()), "mpegts")), "keyframe"),
    "times run backwards": (lambda: Segment(clock_set_back()), "decreasing times"),
    "a gap in the transport stream": (lambda: Segment(2 * of_kind("mpegts").data), "marked as corrupt"),
    "a jump of ten hours": (lambda: Segment(clip("matroska", frames=3, times=[0, 1, 360_000])), "lasts 36000.1"),
    "another size in the middle": (lambda: Segment(of_two_sizes()), "changes the size"),
    "a damaged image": (lambda: Segment(picture(0)[:-40]), "damaged"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_with_a_reason(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    make, why = REFUSED[kind]
    segment = make()
    capfd.readouterr()
    message = refused(segment)
    assert any(part in message for part in why.split("|")), message
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (MediaConfig(max_item_bytes=99), "bytes; the limit is 99"),
        (MediaConfig(max_video_seconds=3.9), "lasts 4.0 seconds; the limit is 3.9"),
        (MediaConfig(max_pixels=64 * 48 - 1), "3071"),
        (MediaConfig(max_video_pixels=64 * 48 * 40 - 1), "has 40 frames of 64 x 48 pixels"),
        (MediaConfig(max_sampled_pixels=64 * 48 * 3), "pixels in its sampled frames; the limit is 9216"),
    ],
)
@pytest.mark.parametrize("kind", ["mpegts", "h264"])
def test_limits(kind: str, limits: MediaConfig, why: str) -> None:
    assert why in refused(of_kind(kind), limits)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_ends_in_frames_or_a_typed_error(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(kind)
    capfd.readouterr()
    refusals = 0
    for _ in range(25):
        data = bytearray(of_kind(kind).data)
        for _ in range(rng.choice((1, 10, 100))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            frames, _end = read([Segment(bytes(data), of_kind(kind).init)], FixedRate(10.0))
            assert [f.seconds for f in frames] == sorted(f.seconds for f in frames)
        except InvalidArgument as error:
            assert error.violations[0].field == "segment"
            refusals += 1
    assert refusals > 5
    assert capfd.readouterr() == ("", "")


def by(decoders: Decoders, segment: Segment, sampler: Sampler, begin: float) -> tuple[Read, Sampler]:
    def work(decode: Any) -> tuple[Read, Sampler]:
        return decode_segment(decode, segment, begin=begin, sampler=sampler, field=FIELD)

    with closing(decoders.map([work], go_on)) as results:
        return next(results)


def test_a_process_reads_segments_as_this_one_does() -> None:
    segments = cut(whole(), "fragments", [1, 3])
    with closing(DecodePool(LIMITS)) as pool:
        for decoders in (InPlace(LIMITS), pool):
            sampler: Sampler = FixedRate(3.0)
            end, frames = 1.0, []
            for segment in segments:
                with pytest.raises(InvalidArgument, match="is cut off"):  # the sampler does not change
                    by(decoders, Segment(segment.data[:-9], segment.init), sampler, end)
                found, sampler = by(decoders, segment, sampler, end)
                frames += found.frames
                end = found.end
            expected, expected_end = read(segments, FixedRate(3.0), begin=1.0)
            assert [f.seconds for f in frames] == [f.seconds for f in expected] and end == expected_end
            assert all(np.array_equal(a.image, b.image) for a, b in zip(frames, expected, strict=True))
        assert pool.budget.used == 0
