"""Video files to frames: which ones, exactly as decoded one after the other, and typed errors for all else."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from clips import SIZE, Clip, all_frames, clip, decode_video, pictures_of, silence
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmserve.config import MediaConfig
from mmserve.encode import frames as decoding
from mmserve.encode.sampling import spread
from mmserve.errors import FieldViolation, InvalidArgument

LIMITS = MediaConfig()


def decoded(data: bytes, frames: int = 8) -> Clip:
    return decode_video(data, LIMITS, frames=frames)


def refused(data: bytes, limits: MediaConfig = LIMITS) -> str:
    with pytest.raises(InvalidArgument) as raised:
        decode_video(data, limits, frames=4, field="messages[0].parts[1].video")
    (violation,) = raised.value.violations
    assert violation.field == "messages[0].parts[1].video"
    return violation.description


@pytest.mark.parametrize(("rate", "count"), [(0.0, 8), (0.1, 1), (0.5, 2), (1.0, 4), (3.0, 8)])
def test_a_short_clip_has_so_many_frames_a_second(rate: float, count: int) -> None:
    data = clip(frames=40, rate=10)
    shown = decode_video(data, LIMITS, frames=8, rate=rate)
    assert len(shown.frames) == count
    assert shown.seconds == decoded(data, count).seconds


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[decoding.Decoder]:
    """The decoders made, to see what they did."""
    made: list[decoding.Decoder] = []
    build = decoding.Decoder.__init__

    def init(self: decoding.Decoder, *args: object) -> None:
        made.append(self)
        build(self, *args)

    monkeypatch.setattr(decoding.Decoder, "__init__", init)
    return made


@pytest.mark.parametrize("gop", [8, 30, 250])
@pytest.mark.parametrize(
    ("kind", "codec", "options"),
    [
        ("mp4", "libx264", {}),
        ("mp4", "libx264", {"x264-params": "open-gop=1"}),
        ("mp4", "libx264", {"x264-params": "intra-refresh=1"}),  # its keyframes are none to start at
        ("mp4", "libx264", {"movflags": "frag_keyframe+empty_moov"}),
        ("mov", "libx264", {}),
        ("matroska", "libx264", {}),
        ("avi", "libx264", {}),  # without presentation times
        ("avi", "mpeg4", {}),
        ("webm", "libvpx-vp9", {"lag-in-frames": "8", "cpu-used": "8"}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_bit_for_bit_as_decoded_in_order(kind: str, codec: str, options: dict[str, str], gop: int) -> None:
    data = clip(kind, codec, gop=gop, **options)
    every = all_frames(data)
    assert len(every) == 40
    for frames in (1, 3, 8, 39):
        found = decoded(data, frames)
        assert len(found.frames) == frames
        indices = [round(seconds * 10) for seconds in found.seconds]
        assert indices == spread(range(40), 40, frames)
        for image, index in zip(found.frames, indices, strict=True):
            assert image.mode == "RGB" and image.size == SIZE
            assert np.array_equal(np.asarray(image), every[index]), (frames, index)


def test_the_clips_have_frames_that_refer_forward() -> None:
    with av.open(io.BytesIO(clip())) as container:
        shown = [p.pts for p in container.demux(video=0) if p.size]
    assert shown != sorted(shown)


def test_decoding_starts_again_only_at_a_keyframe_on_the_way(decodes: list[decoding.Decoder]) -> None:
    """Of 40 frames with one wanted at 5, 15, 25 and 35: short groups of pictures are passed over, a long one is not."""
    work = {}
    for gop in (5, 20, 250):
        decoded(clip(gop=gop), 4)
        work[gop] = decodes.pop().decoded
    assert work[250] == 36  # one pass, up to the last frame wanted
    assert work[20] == 16 + 16  # from 0 to 15 and from 20 to 35
    assert work[5] == 4  # each one is a keyframe


def test_keyframes_that_are_none_cost_one_more_pass(decodes: list[decoding.Decoder]) -> None:
    decoded(clip(gop=8, **{"x264-params": "intra-refresh=1"}), 8)
    assert list(decodes[0]._keys) == [] and decodes[0].decoded < 2 * 40


@pytest.mark.parametrize(
    ("times", "end", "count", "expected"),
    [
        (range(8), 8, 8, range(8)),
        (range(3), 3, 8, range(3)),
        (range(16), 16, 8, [1, 3, 5, 7, 9, 11, 13, 15]),
        (range(100, 110), 110, 2, [2, 7]),
        (range(9), 9, 1, [4]),
        ([0, 1, 2, 3, 100], 101, 2, [3]),  # the last is on screen for one tick: both middles show the fourth
        ([0, 97, 98, 99], 100, 2, [0]),
        ([5], 5, 4, [0]),
        ([0, 0, 0], 0, 2, [2]),
    ],
)
def test_spread(times: list[int], end: int, count: int, expected: list[int]) -> None:
    assert spread(times, end, count) == list(expected)


@given(st.lists(st.integers(0, 10_000), min_size=1, unique=True), st.integers(1, 40), st.integers(0, 500))
def test_spread_takes_each_once_and_what_is_on_screen(times: list[int], count: int, last: int) -> None:
    times.sort()
    end = times[-1] + last
    found = spread(times, end, count)
    assert found == sorted(set(found)) and 1 <= len(found) <= count
    if len(times) <= count:
        assert found == list(range(len(times)))
        return
    width = (end - times[0]) / count
    for i in range(count):
        middle = times[0] + (i + 0.5) * width
        assert any(times[f] <= middle + 1e-6 and (f + 1 == len(times) or times[f + 1] >= middle - 1e-6) for f in found)


def test_variable_frame_rate() -> None:
    """Twenty frames in the first second, then one a second: even in time is not even in frames."""
    times = [*range(20), *range(20, 200, 20)]
    data = clip("matroska", frames=len(times), rate=20, times=times)
    found, every = decoded(data, 5), all_frames(data)
    # 9.05 s (the last frame is said to last 1/20 s) in five spans: middles at 0.905, 2.715, 4.525, 6.335 and 8.145 s
    assert [round(s, 3) for s in found.seconds] == [0.9, 2.0, 4.0, 6.0, 8.0]
    for image, index in zip(found.frames, (18, 21, 23, 25, 27), strict=True):
        assert np.array_equal(np.asarray(image), every[index])


def test_fewer_frames_than_asked_for() -> None:
    found = decoded(clip(frames=3), 8)
    assert len(found.frames) == 3 and [round(s, 3) for s in found.seconds] == [0.0, 0.1, 0.2]
    one = decoded(clip(frames=1), 8)
    assert len(one.frames) == 1 and one.seconds == (0.0,)


@pytest.mark.parametrize("kind", ["mp4", "matroska"])
def test_time_is_counted_from_the_first_frame(kind: str) -> None:
    """A recording that was cut out of a long one begins ten hours after it."""
    found = decoded(clip(kind, frames=3, times=[360_000, 360_001, 360_002]))
    assert [round(s, 3) for s in found.seconds] == [0.0, 0.1, 0.2]


def test_a_file_that_does_not_say_how_long_it_is() -> None:
    """Written as a live stream: no duration, no index, sizes not known."""

    class Pipe(io.RawIOBase):
        """What cannot be gone back in."""

        def __init__(self) -> None:
            self.data = b""

        def write(self, data: bytes) -> int:  # type: ignore[override]
            self.data += bytes(data)
            return len(data)

        def writable(self) -> bool:
            return True

    pipe = Pipe()
    with av.open(io.BytesIO(clip("matroska"))) as source, av.open(pipe, "w", format="matroska") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    with av.open(io.BytesIO(pipe.data)) as container:
        assert container.duration is None
    every = all_frames(pipe.data)
    found = decoded(pipe.data, 4)
    assert [round(s * 10) for s in found.seconds] == [5, 15, 25, 35]
    assert all(np.array_equal(np.asarray(f), every[i]) for f, i in zip(found.frames, (5, 15, 25, 35), strict=True))


ONE = 1 << 16


@pytest.mark.parametrize(
    ("matrix", "turn"),
    [
        ((ONE, 0, 0, ONE), None),
        ((0, ONE, -ONE, 0), Image.Transpose.ROTATE_270),  # as a phone held upright writes it: a quarter turn clockwise
        ((-ONE, 0, 0, -ONE), Image.Transpose.ROTATE_180),
        ((0, -ONE, ONE, 0), Image.Transpose.ROTATE_90),
        ((-ONE, 0, 0, ONE), Image.Transpose.FLIP_LEFT_RIGHT),
        ((ONE, 0, 0, -ONE), Image.Transpose.FLIP_TOP_BOTTOM),
        ((0, ONE, ONE, 0), Image.Transpose.TRANSPOSE),
        ((0, -ONE, -ONE, 0), Image.Transpose.TRANSVERSE),
    ],
)
def test_display_matrix(matrix: tuple[int, int, int, int], turn: Image.Transpose | None) -> None:
    """Points (x, y) of the coded picture go to (a x + c y, b x + d y); compared at every corner's neighbourhood."""
    a, b, c, d = matrix
    (upright,) = decoded(clip(frames=1, matrix=(a, b, 0, c, d, 0, 0, 0, 1 << 30))).frames
    (plain,) = decoded(clip(frames=1)).frames
    assert np.array_equal(np.asarray(upright), np.asarray(plain if turn is None else plain.transpose(turn)))
    coded, shown = np.asarray(plain), np.asarray(upright)
    for x, y in ((0, 0), (63, 0), (0, 47), (63, 47), (20, 10)):
        to_x, to_y = (a * x + c * y) // ONE, (b * x + d * y) // ONE
        to_x += (63 if a < 0 else 0) + (47 if c < 0 else 0)
        to_y += (63 if b < 0 else 0) + (47 if d < 0 else 0)
        assert np.array_equal(shown[to_y, to_x], coded[y, x])


def test_sound_beside_the_pictures_changes_nothing() -> None:
    with_sound = clip("matroska", sound=True)
    without = pictures_of(with_sound)
    assert len(without) < len(with_sound)
    assert decoded(with_sound).seconds == decoded(without).seconds
    pairs = zip(decoded(with_sound).frames, decoded(without).frames, strict=True)
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def saved(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 20), "red").save(file, kind)
    return file.getvalue()


def cover_alone() -> bytes:
    """An MP4 whose only picture is the cover of its sound."""
    file = io.BytesIO()
    with av.open(io.BytesIO(silence())) as source, av.open(file, "w", format="mp4") as target:
        sound = target.add_stream_from_template(source.streams.audio[0])
        cover = target.add_stream("png", rate=1)
        cover.width, cover.height, cover.pix_fmt = 16, 16, "rgb24"
        cover.disposition = av.stream.Disposition.attached_pic
        target.mux(cover.encode(av.VideoFrame(16, 16, "rgb24")))
        for packet in source.demux(audio=0):
            if packet.size:
                packet.stream = sound
                target.mux(packet)
    return file.getvalue()


def without_keyframe(kind: str, codec: str) -> bytes:
    """A file that goes on from a frame which is not in it."""
    file = io.BytesIO()
    with av.open(io.BytesIO(clip(kind, codec, gop=250))) as source, av.open(file, "w", format=kind) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size and not packet.is_keyframe:
                packet.stream = stream
                target.mux(packet)
    return file.getvalue()


def fragmented() -> bytes:
    return clip(movflags="frag_keyframe+empty_moov")


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "is empty"),
    "one byte": (lambda: b"\0", "a file of unknown kind, not a readable MP4"),
    "text": (lambda: b"no video at all\n" * 40, "not a readable"),
    "noise": (lambda: random.Random(0).randbytes(4000), "not a readable"),
    "PNG": (lambda: saved("PNG"), "is an image, not a readable"),
    "JPEG": (lambda: saved("JPEG"), "is an image"),
    "GIF": (lambda: saved("GIF"), "is an image"),
    "WebP": (lambda: saved("WEBP"), "is an image"),
    "HEIC": (lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99), "is an image"),
    "MPEG program stream": (lambda: clip("vob", "mpeg2video"), "a file of unknown kind"),
    "transport stream": (lambda: clip("mpegts"), "a file of unknown kind"),
    "FLV": (lambda: clip("flv"), "is another media file"),
    "a playlist": (lambda: b"#EXTM3U\nhttp://localhost/a.mp4\n", "a file of unknown kind"),
    "audio only": (silence, "has no video stream"),
    "a cover alone": (cover_alone, "has no video stream"),
    "cut off MP4": (lambda: clip()[:-100], "is cut off"),
    "cut off MP4, index in front": (lambda: fragmented()[:-100], "is cut off"),
    "cut off MOV": (lambda: clip("mov")[:-1], "is cut off"),
    "cut off Matroska": (lambda: clip("matroska")[:-100], "is cut off"),
    "cut off WebM": (lambda: clip("webm", "libvpx")[: 1 << 10], "is cut off"),
    "cut off AVI": (lambda: clip("avi")[:-100], "is cut off"),
    "header of an MP4 alone": (lambda: clip()[:32], "damaged|cut off"),
    "header of a Matroska alone": (lambda: clip("matroska")[:40], "damaged|cut off"),
    "MP4 header before noise": (lambda: clip()[:32] + random.Random(1).randbytes(900), "damaged|cut off|no video"),
    "no keyframe in AVI": (lambda: without_keyframe("avi", "mpeg4"), "has no keyframe"),
    "no keyframe in Matroska": (lambda: without_keyframe("matroska", "mpeg4"), "has no keyframe"),
    "no keyframe in MP4": (lambda: without_keyframe("mp4", "libx264"), "has no keyframe"),
    "no keyframe in WebM": (lambda: without_keyframe("webm", "libvpx-vp9"), "has no keyframe"),
    "a frame after ten hours": (lambda: clip("matroska", frames=3, times=[0, 1, 360_000]), "lasts 36000.1 seconds"),
    "frames all zero": (lambda: _blanked(clip("matroska")), "damaged"),
    "a frame overwritten": (lambda: _overwritten(clip("matroska", gop=250)), "damaged"),
}


def _payloads(data: bytes) -> list[tuple[int, int]]:
    with av.open(io.BytesIO(data)) as container:
        packets = [bytes(p) for p in container.demux(video=0) if p.size]
    return [(data.index(packet), len(packet)) for packet in packets]


def _blanked(data: bytes) -> bytes:
    broken = bytearray(data)
    for at, size in _payloads(data):
        broken[at : at + size] = bytes(size)
    return bytes(broken)


def _overwritten(data: bytes) -> bytes:
    broken = bytearray(data)
    at, size = _payloads(data)[2]
    broken[at + size // 2 : at + size] = random.Random(0).randbytes(size - size // 2)
    return bytes(broken)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_with_a_reason(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    make, why = REFUSED[kind]
    data = make()
    capfd.readouterr()
    message = refused(data)
    assert any(part in message for part in why.split("|")), message
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (MediaConfig(max_item_bytes=99), "bytes; the limit is 99"),
        (MediaConfig(max_video_seconds=3.9), "lasts 4.0 seconds; the limit is 3.9"),
        (MediaConfig(max_side=63), "64 x 48 pixels; the limit is 63 a side"),
        (MediaConfig(max_pixels=64 * 48 - 1), "64 x 48 pixels; the limit is 3071 in all"),
        (MediaConfig(max_video_pixels=64 * 48 * 40 - 1), "has 40 frames of 64 x 48 pixels"),
        (MediaConfig(max_sampled_pixels=64 * 48 * 3), "pixels in its sampled frames; the limit is 9216"),
        (MediaConfig(max_video_seconds=0.1), "has more than 24 frames (240 a second)"),
    ],
)
def test_limits(limits: MediaConfig, why: str) -> None:
    assert why in refused(clip(), limits)


def test_sizes_that_only_the_frames_tell() -> None:
    """WebM's VP9 has its size in the frames: FFmpeg, told the limit, does not begin to decode a larger one."""
    data = clip("webm", "libvpx-vp9", frames=2)
    assert "of more than 3071 pixels" in refused(data, MediaConfig(max_pixels=64 * 48 - 1))
    assert len(decode_video(data, MediaConfig(max_pixels=64 * 48), frames=4).frames) == 2


def test_at_its_limits() -> None:
    data = clip()
    limits = MediaConfig(
        max_item_bytes=len(data),
        max_video_seconds=4.0,
        max_side=64,
        max_pixels=64 * 48,
        max_video_pixels=64 * 48 * 40,
        max_sampled_pixels=64 * 48 * 4,
    )
    assert len(decode_video(data, limits, frames=4).frames) == 4


def test_frames_that_grow_on_the_way_count_as_they_are() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream: Any = container.add_stream("mjpeg", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for index, (width, height) in enumerate([(64, 48), (64, 48), (128, 96), (128, 96)]):
            picture = io.BytesIO()
            Image.new("RGB", (width, height), (60 * index, 9, 9)).save(picture, "JPEG")
            packet = av.Packet(picture.getvalue())
            packet.stream, packet.pts, packet.dts = stream, index, index
            packet.time_base, packet.is_keyframe = Fraction(1, 4), True
            container.mux(packet)
    sizes = [frame.size for frame in decode_video(file.getvalue(), MediaConfig(), frames=4).frames]
    assert sizes == [(64, 48), (64, 48), (128, 96), (128, 96)]
    assert "the limit is 20000" in refused(file.getvalue(), MediaConfig(max_sampled_pixels=20_000))


@pytest.mark.parametrize(("kind", "codec"), [("mp4", "libx264"), ("matroska", "libx264"), ("avi", "mpeg4")])
def test_damage_ends_in_frames_or_a_typed_error(kind: str, codec: str, capfd: pytest.CaptureFixture[str]) -> None:
    whole = clip(kind, codec, gop=20, frames=20)
    rng = random.Random(0)
    capfd.readouterr()
    refusals = 0
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 10, 100))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            assert 1 <= len(decoded(bytes(data)).frames) <= 8
        except InvalidArgument as error:
            assert isinstance(error.violations[0], FieldViolation)
            refusals += 1
    assert refusals > 10
    assert capfd.readouterr() == ("", "")
