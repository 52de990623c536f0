"""Frames of a video stream by time, with minimal decoding, bitwise equal to sequential decoding."""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from io import BytesIO
from typing import Any

import av
from av.container import InputContainer
from av.error import FFmpegError
from av.sidedata.sidedata import Type
from av.stream import Disposition
from av.video.stream import VideoStream
from PIL import Image

from mmserve.config import MediaConfig
from mmserve.encode.containers import RAW
from mmserve.encode.index import Index
from mmserve.encode.media import OUT_OF_MEMORY, check_size, named
from mmserve.encode.parallel import in_parallel
from mmserve.encode.watch import Watch
from mmserve.errors import InvalidArgument

#: Exceptions of PyAV on damaged files other than FFmpeg's errors.
_DAMAGE = (FFmpegError, ValueError, OverflowError, RuntimeError)
#: Number of decoded packets that are kept: a decoder reads up to 16 packets ahead of the frame that it returns, and
#: decoding may have to restart at a keyframe among them.
_KEPT_PACKETS = 64
#: Decoded pixels from which on several threads pay off (some 0.3 s of one core).
PARALLEL_PIXELS = 100_000_000


class VideoFile:
    """One video stream of a file, opened and indexed; its header and packets are within ``limits``."""

    def __init__(
        self,
        data: bytes,
        container: InputContainer,
        stream: VideoStream,
        limits: MediaConfig,
        field: str,
        index: Index | None = None,
    ) -> None:
        context = stream.codec_context
        if context is None or stream.time_base is None:
            raise InvalidArgument.of(field, "has a codec that this server cannot decode")
        if not (context.width and context.height):  # missing in the header, and FFmpeg refused to read it from a frame
            raise InvalidArgument.of(
                field, f"has frames of no readable size, or of more than {limits.max_pixels} pixels"
            )
        check_size((context.width, context.height), limits, field)
        context.thread_type = "SLICE"  # frame threads may deadlock if decoding stops early
        context.thread_count = 1  # one core for each clip, within its time limit
        self.data, self.container, self.stream = data, container, stream
        self.context, self.tick = context, stream.time_base
        self.width, self.height = context.width, context.height
        self.index = index or Index.of(container, stream, limits, field)
        self._limits, self._field = limits, field
        self._check()

    def _check(self) -> None:
        limits, seconds = self._limits, self.seconds
        if seconds > limits.max_video_seconds:
            why = f"the limit is {limits.max_video_seconds:g} {named('max_video_seconds')}"
            raise InvalidArgument.of(self._field, f"lasts {seconds:.1f} seconds; {why}")
        packets, size = self.index.packets, f"{self.width} x {self.height}"
        if packets * self.width * self.height > limits.max_video_pixels:
            raise InvalidArgument.of(
                self._field,
                f"has {packets} frames of {size} pixels; "
                f"the limit is {limits.max_video_pixels} pixels in all {named('max_video_pixels')}",
            )

    @property
    def seconds(self) -> float:
        """Seconds from the beginning of the first frame to the end of the last."""
        return float((self.index.end - self.index.times[0]) * self.tick)

    def at(self, time: int) -> float:
        """Seconds from the beginning of the first frame to ``time`` (ticks)."""
        return float((time - self.index.times[0]) * self.tick)

    def pick(self, wanted: Sequence[int], watch: Watch, window: int = 0) -> Iterator[tuple[int, Image.Image]]:
        """The frames with these indices (ascending) of ``index.times``: start in ticks, and RGB picture, upright.

        If a packet shows no frame, the first frame after it; each frame once. Pixels are reserved in advance. Large
        amounts are decoded in ``MediaConfig.decode_threads`` threads, each from a keyframe on. ``window``: number of
        frames that the caller holds at once; 0 = all.
        """
        limits, field = self._limits, self._field
        threads = self._threads(runs := self.index.runs(wanted))
        ahead = 2 * threads if window and threads > 1 else None
        most = min(len(wanted), window + (ahead or 0)) if window else len(wanted)
        _check_sampled(len(wanted) * self.width * self.height, limits, field)
        watch.reserve(reserved := most * self.width * self.height)
        found = in_parallel(self, runs, threads, watch, ahead) if threads > 1 else self.sequence(wanted, watch)
        seen, last = 0, None
        with closing(found) as frames:
            for time, image in frames:
                seen += image.width * image.height  # streams may change their size
                _check_sampled(seen, limits, field)
                needed = most * image.width * image.height if window else seen
                if needed > reserved:
                    watch.reserve(needed - reserved)
                    reserved = needed
                if last is None or time > last:
                    last = time
                    yield time, image

    def sequence(self, wanted: Iterable[int], watch: Watch) -> Generator[tuple[int, Image.Image], None, None]:
        """As ``pick``, in one thread; a frame shown for several of ``wanted`` is repeated."""
        decoder = self.decoder(watch)
        for number in wanted:
            frame = self.frame(decoder, number)
            if frame is None:
                return
            yield frame

    def decoder(self, watch: Watch) -> Decoder:
        """A decoder for ``frame``, at the beginning of the stream."""
        return Decoder(self, watch)

    def frame(self, decoder: Decoder, number: int) -> tuple[int, Image.Image] | None:
        """A frame with its start in ticks; None if the stream ends before it."""
        frame = decoder.at(number)
        if frame is None:
            return None
        if frame.is_corrupt:
            raise InvalidArgument.of(self._field, "is a damaged video: a frame cannot be decoded completely")
        check_size((frame.width, frame.height), self._limits, self._field)
        time = frame.pts if self.index.ordered else None
        return self.index.times[number] if time is None else time, upright(frame)

    @contextmanager
    def reopened(self) -> Iterator[VideoFile]:
        """The same stream and index, opened again for another thread."""
        demuxer = self.container.format.name.split(",")[0]
        with _opened(self.data, demuxer, self._limits, self._field) as (container, stream):
            yield VideoFile(self.data, container, stream, self._limits, self._field, self.index)

    def _threads(self, runs: Sequence[Sequence[int]]) -> int:
        """The number of threads that pays off."""
        size = self.width * self.height
        if self.index.decoded(runs) * size < PARALLEL_PIXELS:
            return 1
        # each thread has a decoder with its reference frames
        return min(self._limits.decode_threads, os.cpu_count() or 1, len(runs), self._limits.max_pixels // size)

    def packets(self) -> Iterator[av.Packet]:
        """All packets of the stream from its beginning; one iterator at a time."""
        self._rewind()
        packets = (packet for packet in self.container.demux(self.stream) if packet.size)
        first = next(packets, None)
        if first is not None and (first.pts, first.size) == self.index.first:
            yield first
            yield from packets
        else:  # the container does not support seeking
            with self.reopened() as own:
                yield from (packet for packet in own.container.demux(own.stream) if packet.size)

    def _rewind(self) -> None:
        if self.container.format.name in (*RAW, "mpegts"):
            self.container.seek(0, stream=self.stream, unsupported_byte_offset=True)
        else:
            first, _size = self.index.first
            self.container.seek(min(first or 0, 0), stream=self.stream)


@contextmanager
def opened(data: bytes, demuxer: str, limits: MediaConfig, field: str) -> Iterator[VideoFile]:
    """The first video stream in ``data``; raises ``InvalidArgument`` with ``field`` for errors, also within the
    context."""
    with _opened(data, demuxer, limits, field) as (container, stream):
        yield VideoFile(data, container, stream, limits, field)


@contextmanager
def _opened(data: bytes, demuxer: str, limits: MediaConfig, field: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    options = {"max_pixels": str(limits.max_pixels), "err_detect": "explode"}
    try:
        with av.open(BytesIO(data), mode="r", format=demuxer, options=options, metadata_errors="replace") as container:
            stream = next((s for s in container.streams.video if not s.disposition & Disposition.attached_pic), None)
            if stream is None:
                raise InvalidArgument.of(field, "has no video stream")
            yield container, stream
    except (MemoryError, av.error.MemoryError):
        raise InvalidArgument.of(field, OUT_OF_MEMORY) from None
    except _DAMAGE as error:
        raise InvalidArgument.of(field, f"is a damaged or unknown video: {_reason(error)}") from None


class Decoder:
    """Frames of one stream by time; they must be requested in ascending order.

    Decoding jumps to a keyframe only if there is one between the last decoded frame and the requested one.
    """

    def __init__(self, video: VideoFile, watch: Watch) -> None:
        self._index, self._context, self._watch = video.index, video.context, watch
        self._packets = _Packets(video)
        self._keys = self._index.keys
        self._frames = self._decode(0)
        self._last: av.VideoFrame | None = None  # the last decoded frame
        self._rank = -1  # its index among all frames
        self._reached = self._index.times[0]  # the maximum time of a decoded frame
        self.decoded = 0

    def at(self, number: int) -> av.VideoFrame | None:
        """The frame of ``times[number]``, or the first after it if its packet shows none; None at the end.

        Decoding restarts at the beginning of the file if a presumed keyframe is not one.
        """
        wanted = self._index.times[number]
        place = bisect_right(self._keys, wanted) - 1
        ahead = place >= 0 and self._keys[place] > self._reached
        if ahead and not self._jump(self._keys[place], self._index.key_packets[place]):
            self._keys = []
            self._start(0)
        while self._last is None or self._time(self._last) < (wanted if self._index.ordered else number):
            if not self._advance():
                return None
        return self._last

    def _jump(self, time: int, packet: int) -> bool:
        """Jump to the keyframe of ``time``; returns False if the decoded frame is not a keyframe of that time."""
        self._start(packet)
        try:
            while self._advance():
                # frames before the keyframe may lack references: skip them
                if self._last is not None and self._time(self._last) >= time:
                    return self._time(self._last) == time and self._last.key_frame
        except FFmpegError:
            return False
        return False

    def _start(self, packet: int) -> None:
        self._context.flush_buffers()
        self._frames, self._last, self._rank = self._decode(packet), None, -1

    def _advance(self) -> bool:
        frame = next(self._frames, None)
        if frame is None:
            return False
        self._last, self._rank = frame, self._rank + 1
        self.decoded += 1
        self._watch.check()
        if frame.pts is not None:
            self._reached = max(self._reached, frame.pts)
        return True

    def _time(self, frame: av.VideoFrame) -> int:
        if self._index.ordered and frame.pts is not None:
            return frame.pts
        return self._rank

    def _decode(self, start: int) -> Iterator[av.VideoFrame]:
        for packet in self._packets.since(start):
            yield from self._context.decode(packet)
        yield from self._context.decode(None)


class _Packets:
    """Packets of a stream by number; going back more than a few of them reads the file again."""

    def __init__(self, video: VideoFile) -> None:
        self._video = video
        self._source, self._next = video.packets(), 0  # number of the next packet
        self._kept: deque[av.Packet] = deque(maxlen=_KEPT_PACKETS)

    def since(self, number: int) -> Iterator[av.Packet]:
        """Packet ``number`` and those after it."""
        while True:
            if number < self._next - len(self._kept):
                self._source, self._next = self._video.packets(), 0
                self._kept.clear()
            while number >= self._next:
                packet = next(self._source, None)
                if packet is None:
                    return
                self._kept.append(packet)
                self._next += 1
            yield self._kept[number - self._next]
            number += 1


def _check_sampled(pixels: int, limits: MediaConfig, field: str) -> None:
    if pixels > limits.max_sampled_pixels:
        why = f"the limit is {limits.max_sampled_pixels} {named('max_sampled_pixels')}: send it smaller"
        raise InvalidArgument.of(field, f"has {pixels} pixels in its sampled frames; {why}")


def upright(frame: av.VideoFrame) -> Image.Image:
    """The frame as a picture, rotated and mirrored by its display matrix (``libavutil/display.h``)."""
    image = frame.to_image(threads=1)  # scaler threads would live until the frame is freed, two a frame
    image.info = {}
    side_data: Any = frame.side_data  # PyAV's stub declares only motion vectors
    matrix = side_data.get(Type.DISPLAYMATRIX)
    if matrix is None:
        return image
    right_x, right_y, _u, down_x, down_y = struct.unpack_from("=5i", bytes(matrix))
    if abs(right_x) + abs(down_y) >= abs(right_y) + abs(down_x):
        turn = _STRAIGHT[right_x < 0, down_y < 0]
    else:
        turn = _TURNED[right_y < 0, down_x < 0]
    return image if turn is None else image.transpose(turn)


#: Operations by the signs of the directions of the picture's right and down edges: unswapped, and swapped axes.
_STRAIGHT = {
    (False, False): None,
    (True, False): Image.Transpose.FLIP_LEFT_RIGHT,
    (False, True): Image.Transpose.FLIP_TOP_BOTTOM,
    (True, True): Image.Transpose.ROTATE_180,
}
_TURNED = {
    (False, False): Image.Transpose.TRANSPOSE,
    (False, True): Image.Transpose.ROTATE_270,
    (True, False): Image.Transpose.ROTATE_90,
    (True, True): Image.Transpose.TRANSVERSE,
}


def _reason(error: BaseException) -> str:
    return error.strerror or "it cannot be read" if isinstance(error, FFmpegError) else str(error)
