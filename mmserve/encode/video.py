"""Video files from a client to a few RGB frames with their times, within limits that are checked before decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image

from mmserve.config import MediaConfig
from mmserve.encode.containers import CONTAINERS, cut_off, file_demuxer, looks_like
from mmserve.encode.frames import opened
from mmserve.encode.index import NO_FRAMES
from mmserve.encode.media import too_large
from mmserve.encode.sampling import spread
from mmserve.encode.watch import UNWATCHED, Watch
from mmserve.errors import InvalidArgument


@dataclass(frozen=True)
class Clip:
    """Frames of a video in order, mode RGB, upright, all as large as they were; ``seconds`` since its first frame."""

    frames: tuple[Image.Image, ...]
    seconds: tuple[float, ...]


def decode_video(data: bytes, limits: MediaConfig, *, frames: int, rate: float = 0.0, field: str = "video") -> Clip:
    """All that ``read_video`` yields."""
    seconds, images = zip(*read_video(data, limits, frames=frames, rate=rate, field=field), strict=True)
    return Clip(images, seconds)


def read_video(
    data: bytes,
    limits: MediaConfig,
    *,
    frames: int,
    rate: float = 0.0,
    field: str = "video",
    watch: Watch = UNWATCHED,
) -> Iterator[tuple[float, Image.Image]]:
    """At most ``frames`` frames of an MP4, MOV, Matroska, WebM or AVI file, spread evenly over its time, each with the
    seconds since the first frame of the file.

    Of a short one there are ``rate`` a second, one at least (0 = no fewer). Which frames is ``spread``'s choice. Only
    what they need is decoded: packets are read once, and decoding goes on from where it is unless a keyframe lies
    between there and the next frame wanted; then it starts again at that keyframe. The frames are bit for bit those of
    decoding everything. A display matrix (a phone held upright) is applied, to the nearest quarter turn; pixels are
    taken as square.

    Raises ``InvalidArgument`` naming ``field`` when the file is empty, of another kind, without video, damaged or
    cut off, or beyond ``limits`` (bytes, seconds, pixels and side of a frame, pixels of all frames together, and of
    those that are looked at, which are in memory at once).
    """
    if not data:
        raise InvalidArgument.of(field, "is empty (0 bytes)")
    if len(data) > limits.max_item_bytes:
        raise InvalidArgument.of(field, too_large(len(data), limits))
    demuxer = file_demuxer(data)
    if demuxer is None:
        raise InvalidArgument.of(field, f"is {looks_like(data)}, not a readable {', '.join(CONTAINERS)} video")
    if cut_off(data, demuxer):
        raise InvalidArgument.of(field, "is cut off: the file is shorter than its header says")
    with opened(data, demuxer, limits, field) as footage:
        if rate:
            frames = min(frames, max(1, round(rate * footage.seconds)))
        found = False
        for time, image in footage.pick(spread(footage.index.times, footage.index.end, frames), watch):
            found = True
            yield footage.at(time), image
        if not found:
            raise InvalidArgument.of(field, NO_FRAMES)
