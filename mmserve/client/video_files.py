"""Splits video files into segments at keyframes, without decoding or encoding."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmserve.errors import ConfigError, InvalidArgument

#: Minimum length (seconds) of a segment, which ends before a keyframe.
SEGMENT_SECONDS = 2.0


@dataclass(frozen=True)
class FileSegment:
    """A segment of a file, as Matroska; times are seconds since the file's first frame."""

    data: bytes = field(repr=False)
    start: float
    end: float


def file_segments(source: Any, seconds: float = SEGMENT_SECONDS, **open_options: Any) -> Iterator[FileSegment]:
    """The first video stream of ``source`` (anything that PyAV opens), split at keyframes at least ``seconds`` apart.

    Raises ``ConfigError`` if PyAV is not installed, ``InvalidArgument`` if it is not a video.
    """
    try:
        import av
    except ImportError as error:
        raise ConfigError("push_file needs PyAV: pip install av") from error
    if not seconds > 0:
        raise InvalidArgument.of("segment_seconds", f"must be above 0, not {seconds}")
    try:
        container = av.open(str(source) if isinstance(source, Path) else source, **open_options)
    except av.error.FileNotFoundError:
        raise
    except av.error.FFmpegError as error:
        raise InvalidArgument.of("path", f"cannot be opened as a video: {error}") from error
    with container:
        if not container.streams.video:
            raise InvalidArgument.of("path", "has no video")
        stream = container.streams.video[0]
        try:
            yield from _cut(container, stream, seconds)
        except av.error.FFmpegError as error:
            raise InvalidArgument.of("path", f"cannot be read as a video: {error}") from error


def _cut(container: Any, stream: Any, seconds: float) -> Iterator[FileSegment]:
    packets: list[Any] = []
    first: int | None = None
    for packet in container.demux(stream):
        if not packet.size or packet.pts is None:
            continue
        first = packet.pts if first is None else first
        if packets and packet.is_keyframe and (packet.pts - packets[0].pts) * stream.time_base >= seconds:
            yield _segment(stream, packets, first)
            packets = []
        packets.append(packet)
    if not packets:
        raise InvalidArgument.of("path", "has no frame with a time, as raw H.264: put it into a container such as MP4")
    yield _segment(stream, packets, first or 0)


def _segment(stream: Any, packets: list[Any], first: int) -> FileSegment:
    """A Matroska file with ``packets``; ``first``: time of the file's first frame, in ticks."""
    import av

    start = min(packet.pts for packet in packets)
    end = max(packet.pts + (packet.duration or 0) for packet in packets)
    offset = min(packet.dts if packet.dts is not None else packet.pts for packet in packets)
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        copy = out.add_stream_from_template(stream)
        for packet in packets:
            packet.stream = copy
            packet.pts -= offset
            if packet.dts is not None:
                packet.dts -= offset
            out.mux(packet)
    base = float(stream.time_base)
    return FileSegment(file.getvalue(), max(0.0, (start - first) * base), (end - first) * base)


def due(begun: float, seconds: float, speed: float) -> float:
    """Seconds to wait until time ``seconds`` of a file that has been playing since ``begun`` (monotonic clock)."""
    return max(0.0, begun + seconds / speed - time.monotonic())
