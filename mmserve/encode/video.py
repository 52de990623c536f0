"""Decoding of video files from a client to a few RGB frames with times, with limits checked before decoding."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from PIL import Image

from mmserve.config import MediaConfig
from mmserve.core.generators import Returning
from mmserve.encode.containers import CONTAINERS, cut_off, file_demuxer, looks_like
from mmserve.encode.frames import VideoFile, opened
from mmserve.encode.index import NO_FRAMES
from mmserve.encode.media import named, too_large
from mmserve.encode.sampling import FixedRate, ProcessorFrames, Sampled, Sampler, spread, unpacked
from mmserve.encode.watch import UNWATCHED, Watch
from mmserve.encode.wire import MediaFile
from mmserve.errors import InvalidArgument

#: Called with the planned times of a clip's frames before decoding (None = unknown), and the length, in seconds.
Plan = Callable[[Sequence[float] | None, float], None]


def read_video(
    data: bytes,
    limits: MediaConfig,
    *,
    frames: int,
    rate: float = 0.0,
    field: str = "video",
    watch: Watch = UNWATCHED,
    window: int = 0,
    part: tuple[int, int, int] | None = None,
    plan: Plan = lambda _seconds, _length: None,
) -> Generator[tuple[float, Image.Image], None, float]:
    """At most ``frames`` frames of an MP4, MOV, Matroska, WebM or AVI file, spread evenly over its time, each with the
    seconds since the first frame of the file; the generator returns the seconds of the whole file.

    For a short file ``rate`` frames a second, at least one (0 = always ``frames``). ``spread`` selects the frames.
    Decoding is minimal: packets are read once, and decoding continues from the present position unless a keyframe is
    between it and the next wanted frame; then it jumps to that keyframe. The frames are bitwise equal to those of
    sequential decoding. A display matrix (a phone held upright) is applied, to the nearest quarter turn; pixels are
    assumed to be square.

    Raises ``InvalidArgument`` with ``field`` if the file is empty, of another format, without video, damaged or
    truncated, or beyond ``limits`` (bytes, seconds, pixels and side of a frame, pixels of all frames together, and of
    the sampled ones, which are in memory together).

    ``window``, ``part``: as in ``MediaFile``. ``plan`` is called once, with the times of all planned frames (of all
    parts), and the length of the whole file; a damaged or unusual file may turn out to have other frames.
    """
    with _open_video(data, limits, field) as video:
        if rate:
            frames = min(frames, max(1, round(rate * video.seconds)))
        found = False
        wanted = spread(video.index.times, video.index.end, frames)
        plan([video.at(video.index.times[number]) for number in wanted], video.seconds)
        for time, image in video.pick(_part(video, wanted, part), watch, window):
            found = True
            yield video.at(time), image
        if not found and part is None:
            raise InvalidArgument.of(field, NO_FRAMES)
        return video.seconds


def sample_video(
    data: bytes,
    limits: MediaConfig,
    sampler: Sampler,
    *,
    field: str = "video",
    watch: Watch = UNWATCHED,
    window: int = 0,
    part: tuple[int, int, int] | None = None,
    plan: Plan = lambda _seconds, _length: None,
) -> Generator[Sampled, None, float]:
    """As ``read_video``, for the frames of the file selected by ``sampler``.

    Also raises ``InvalidArgument`` if it would decode more than ``limits.max_sampled_frames`` frames.
    """
    with _open_video(data, limits, field) as video:
        times = [video.at(time) for time in video.index.times]
        wanted = sampler.select(times, video.seconds)
        if len(wanted) > limits.max_sampled_frames:
            why = f"the limit is {limits.max_sampled_frames} {named('max_sampled_frames')}: ask for fewer a second"
            raise InvalidArgument.of(field, f"has {len(wanted)} sampled frames; {why}")
        found = False
        taken = [times[number] for number in wanted]
        if isinstance(sampler, FixedRate):
            taken = sampler.planned(taken)
        plan(taken if isinstance(sampler, FixedRate | ProcessorFrames) else None, video.seconds)
        for time, image in video.pick(_part(video, wanted, part), watch, window):
            chosen = sampler.take(video.at(time), image)
            if chosen is not None:
                found = True
                yield chosen
        if not found and part is None:
            raise InvalidArgument.of(field, NO_FRAMES)
        return video.seconds


def clip_frames(
    file: MediaFile, limits: MediaConfig, watch: Watch = UNWATCHED, plan: Plan = lambda _seconds, _length: None
) -> Generator[Sampled, None, float]:
    """The frames of a clip requested by ``file``, from ``sample_video`` or ``read_video``; returns its length in
    seconds."""
    common: dict[str, Any] = {"field": file.name, "watch": watch, "window": file.window, "plan": plan}
    common["part"] = file.part
    if file.sampler is not None:
        return (yield from sample_video(file.data, limits, unpacked(file.sampler), **common))
    frames = Returning(read_video(file.data, limits, frames=file.frames, rate=file.rate, **common))
    for seconds, image in frames:
        yield Sampled(seconds, image)
    return frames.returned


def _part(video: VideoFile, wanted: Sequence[int], part: tuple[int, int, int] | None) -> Sequence[int]:
    return wanted if part is None else video.index.shared(wanted, *part)


@contextmanager
def _open_video(data: bytes, limits: MediaConfig, field: str) -> Iterator[VideoFile]:
    """The opened file, within ``limits``."""
    if not data:
        raise InvalidArgument.of(field, "is empty (0 bytes)")
    if len(data) > limits.max_item_bytes:
        raise InvalidArgument.of(field, too_large(len(data), limits))
    demuxer = file_demuxer(data)
    if demuxer is None:
        raise InvalidArgument.of(field, f"is {looks_like(data)}, not a readable {', '.join(CONTAINERS)} video")
    if cut_off(data, demuxer):
        raise InvalidArgument.of(field, "is cut off: the file is shorter than its header states")
    with opened(data, demuxer, limits, field) as video:
        yield video
