"""Decoding of pushed pieces of a live stream into the frames selected by its sampler, with stream times."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmserve.config import MediaConfig
from mmserve.core.generators import Returning
from mmserve.encode.containers import CONTAINERS, STREAMED, cut_off, is_image, looks_like, needs_init, segment_demuxer
from mmserve.encode.frames import VideoFile, opened
from mmserve.encode.media import decode_image, too_large
from mmserve.encode.sampling import Sampled, Sampler, packed, unpacked
from mmserve.encode.watch import UNWATCHED, Watch
from mmserve.encode.wire import MediaFile, Piece
from mmserve.errors import InvalidArgument

if TYPE_CHECKING:
    from mmserve.encode.child import Pictures


@dataclass(frozen=True)
class Segment:
    """One pushed piece of a stream: video that begins with a keyframe, or one still image.

    ``data``: MP4, MOV, Matroska, WebM, AVI, MPEG-TS, raw H.264 or H.265 (Annex B), or a PNG, JPEG, WebP, GIF, BMP or
    TIFF image. ``init``: the initialisation segment required by a media segment of fragmented MP4 or WebM. ``start``:
    its start in seconds of the stream; None = the end of the previous segment.
    """

    data: bytes = field(repr=False)
    init: bytes = field(default=b"", repr=False)
    start: float | None = None


@dataclass(frozen=True)
class Read:
    """A decoded segment: the selected frames, and its end in seconds of the stream."""

    frames: tuple[Sampled, ...]
    end: float


def read_segment(
    segment: Segment,
    limits: MediaConfig,
    *,
    begin: float,
    sampler: Sampler,
    field: str = "segment",
    watch: Watch = UNWATCHED,
) -> Generator[Sampled, None, float]:
    """The frames of ``segment`` selected by ``sampler``; the generator returns the end of the segment.

    Its first frame begins at ``begin`` seconds of the stream (``segment.start`` is ignored here), and frames are in
    presentation order. Frames that reference a keyframe of the previous segment cannot be decoded and are left out, but
    their duration counts. An image is always selected, and lasts ``sampler.interval``. Only the selected frames and
    their references are decoded; ``sampler`` then expects the next segment. If an error is raised, ``sampler`` may have
    changed.

    Raises ``InvalidArgument`` with ``field`` if the segment is empty, of another format, without video, damaged,
    truncated, without a keyframe at its beginning, beyond ``limits`` (as in ``read_video``), if its times decrease, or
    if the size of its frames changes.
    """
    data = segment.init + segment.data
    if not segment.data:
        raise InvalidArgument.of(field, "is empty (0 bytes)")
    if len(data) > limits.max_item_bytes:
        raise InvalidArgument.of(field, too_large(len(data), limits))
    if is_image(segment.data):
        image = decode_image(segment.data, limits, field=field, watch=watch)
        yield sampler.from_image(begin, image)
        return begin + sampler.interval
    demuxer = segment_demuxer(data)
    if demuxer is None:
        if needs_init(data):
            raise InvalidArgument.of(field, "is a media segment without its initialisation segment: send it as init")
        kinds = ", ".join((*CONTAINERS, *STREAMED))
        raise InvalidArgument.of(field, f"is {looks_like(data)}, not a readable {kinds} video or image")
    if cut_off(data, demuxer):
        raise InvalidArgument.of(field, "is cut off: it is shorter than its header states")
    with opened(data, demuxer, limits, field) as video:
        _check(video, field)
        yield from _chosen(video, begin, sampler, field, watch)
        return begin + video.seconds


def decode_segment(
    decode: Callable[[MediaFile], Pictures],
    segment: Segment,
    *,
    begin: float,
    sampler: Sampler,
    field: str = "segment",
    resize: tuple[int, int, int] | None = None,
) -> tuple[Read, Sampler]:
    """``read_segment`` by a pool's ``decode``; returns its result, and the sampler for the next segment.

    ``sampler`` is unchanged, so that a rejected segment has no effect. ``resize``: as in ``MediaFile``.
    """
    piece = Piece(len(segment.init), begin, packed(sampler))
    pictures = decode(MediaFile(segment.init + segment.data, True, field, resize=resize, piece=piece))
    assert pictures.piece is not None
    frames = zip(pictures.seconds, pictures.frames, pictures.piece.details, strict=True)
    return Read(tuple(Sampled(*each) for each in frames), pictures.piece.end), unpacked(pictures.piece.sampler)


def collected(frames: Generator[Sampled, None, float]) -> tuple[list[Sampled], float]:
    """All frames of ``read_segment``, and the end of the segment."""
    kept = Returning(frames)
    return list(kept), kept.returned


def _check(video: VideoFile, field: str) -> None:
    index = video.index
    if not index.begins_with_key:
        raise InvalidArgument.of(field, "does not begin with a keyframe: cut the stream before keyframes")
    if index.backwards:
        raise InvalidArgument.of(field, _BACKWARDS)


_BACKWARDS = "has decreasing times: begin a new segment where the clock is reset"


def _chosen(
    video: VideoFile, begin: float, sampler: Sampler, field: str, watch: Watch
) -> Generator[Sampled, None, None]:
    index = video.index
    # frames before the first keyframe reference one outside the segment
    skipped = sum(time < index.keys[0] for time in index.times) if index.keys else 0
    times = [begin + video.at(time) for time in index.times[skipped:]]
    wanted = [skipped + number for number in sampler.select(times, begin + video.seconds)]
    size: tuple[int, int] | None = None
    for time, image in video.pick(wanted, watch):
        if size not in (None, image.size):
            to = f"{image.width} x {image.height}"
            raise InvalidArgument.of(field, f"changes the size of its frames to {to} pixels: begin a new segment there")
        size = image.size
        found = sampler.take(begin + video.at(time), image)
        if found is not None:
            yield found
