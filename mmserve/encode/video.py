"""Video bytes from a client to a few RGB frames with their times, within limits that are checked before decoding."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
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
from mmserve.encode.media import OUT_OF_MEMORY, STILL_BRANDS, check_size, named, too_large
from mmserve.encode.watch import UNWATCHED, Watch
from mmserve.errors import InvalidArgument

CONTAINERS = ("MP4", "MOV", "Matroska", "WebM", "AVI")
#: Frames a second beyond which a file is refused: no camera's, and each frame costs a decode.
MAX_RATE = 240

_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_IMAGES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")
#: What PyAV raises on damaged files beside FFmpeg's own errors, which are no subclasses of these.
_DAMAGE = (FFmpegError, ValueError, OverflowError, RuntimeError)
_NO_PACKETS = "has no video frames"


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
    demuxer = _demuxer(data)
    if demuxer is None:
        raise InvalidArgument.of(field, f"is {_looks_like(data)}, not a readable {', '.join(CONTAINERS)} video")
    if _cut_off(data, demuxer):
        raise InvalidArgument.of(field, "is cut off: the file is shorter than its header says")
    options = {"max_pixels": str(limits.max_pixels), "err_detect": "explode"}
    try:
        with av.open(BytesIO(data), mode="r", format=demuxer, options=options, metadata_errors="replace") as container:
            stream = next((s for s in container.streams.video if not s.disposition & Disposition.attached_pic), None)
            if stream is None:
                raise InvalidArgument.of(field, "has no video stream")
            yield from _read(container, stream, limits, frames, rate, field, watch)
    except (MemoryError, av.error.MemoryError):
        raise InvalidArgument.of(field, OUT_OF_MEMORY) from None
    except _DAMAGE as error:
        raise InvalidArgument.of(field, f"is a damaged or unknown video: {_reason(error)}") from None


def spread(times: Sequence[int], end: int, count: int) -> list[int]:
    """Indices of at most ``count`` frames spread evenly over a clip whose frames begin at ``times`` (ascending).

    The clip, ``times[0]`` to ``end``, is cut into ``count`` equal spans, and the frame on screen in the middle of
    each is taken, once. The middle and not the start: where a span is as long as a frame, its start is where one
    frame gives way to the next, and the rounding of a container's clock would choose between them. A clip of no
    more than ``count`` frames gives each of them.
    """
    if len(times) <= count:
        return list(range(len(times)))
    first, length = times[0], end - times[0]
    middles = (first + Fraction((2 * i + 1) * length, 2 * count) for i in range(count))
    return sorted({bisect_right(times, middle) - 1 for middle in middles})


@dataclass(frozen=True)
class _Timeline:
    """What a pass over the packets says: when each frame begins and the last one ends, in ticks of the stream.

    ``ordered`` is False where the container stores no presentation times (AVI): then frames are known by their rank.
    """

    packets: list[av.Packet]
    times: list[int]
    end: int
    ordered: bool

    @classmethod
    def of(cls, container: InputContainer, stream: VideoStream, limits: MediaConfig, field: str) -> _Timeline:
        packets: list[av.Packet] = []
        most = MAX_RATE * limits.max_video_seconds
        for packet in container.demux(stream):
            if not packet.size:
                continue  # the end of the stream, or a frame that AVI says to show again
            if packet.is_corrupt:
                raise InvalidArgument.of(field, "is a damaged video: a packet is marked as corrupt")
            packets.append(packet)
            if len(packets) > most:
                raise InvalidArgument.of(field, f"has more than {most:g} frames ({MAX_RATE} a second)")
        shown = [p for p in packets if not p.is_discard]
        if not shown:
            raise InvalidArgument.of(field, _NO_PACKETS)
        if not any(p.is_keyframe for p in packets):  # some decoders make pictures of nothing and changes to it
            raise InvalidArgument.of(field, "is a damaged video: it has no keyframe, so no frame is whole")
        # AVI has no presentation times, and those that FFmpeg makes up are wrong where frames refer forward
        ordered = all(p.pts is not None for p in shown)
        ordered &= container.format.name != "avi" or all(p.is_keyframe for p in shown)
        times = sorted({t for p in shown if (t := p.pts if ordered else p.dts) is not None})
        if not times:
            raise InvalidArgument.of(field, "has no times for its frames")
        return cls(packets, times, times[-1] + cls._last(stream, shown, times), ordered)

    @staticmethod
    def _last(stream: VideoStream, shown: list[av.Packet], times: list[int]) -> int:
        """Ticks that the last frame is on screen: as its packet says, else as long as the others on average."""
        said = max((p.duration or 0 for p in shown if times[-1] in (p.pts, p.dts)), default=0)
        if said > 0:
            return said
        if len(times) > 1:
            return (times[-1] - times[0]) // (len(times) - 1)
        if stream.average_rate and stream.time_base:
            return int(1 / (stream.average_rate * stream.time_base))
        return 0


class _Decoder:
    """Frames of one stream by their times, which must be asked for in ascending order."""

    def __init__(self, stream: VideoStream, timeline: _Timeline, watch: Watch) -> None:
        self.timeline, self._watch = timeline, watch
        self._context = stream.codec_context
        keys = [(p.pts, i) for i, p in enumerate(timeline.packets) if p.is_keyframe and p.pts is not None]
        self._keys = sorted(keys) if timeline.ordered else []
        self._frames = self._decode(0)
        self._last: av.VideoFrame | None = None  # the latest that came out
        self._rank = -1  # of that frame among all
        self._reached = timeline.times[0]  # time up to which the decoder has come
        self.decoded = 0

    def at(self, index: int) -> av.VideoFrame | None:
        """The frame of ``timeline.times[index]``, or the first after it where its packet shows none; None at the end.

        Decoding starts at a keyframe only where one lies between the decoder and the frame, and falls back to the
        beginning of the file where the keyframe turns out to be none.
        """
        wanted = self.timeline.times[index]
        place = bisect_right(self._keys, wanted, key=lambda key: key[0]) - 1
        if place >= 0 and self._keys[place][0] > self._reached:
            time, packet = self._keys[place]
            if not self._jump(time, packet):
                self._keys = []
                self._start(0)
        while self._last is None or self._time(self._last) < (wanted if self.timeline.ordered else index):
            if not self._advance():
                return None
        return self._last

    def _jump(self, time: int, packet: int) -> bool:
        """Go to the keyframe of ``time``; False where what comes out is no keyframe of that time."""
        self._start(packet)
        try:
            while self._advance():
                # frames before the keyframe may lack what they refer to: they are passed over
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
        if self.timeline.ordered and frame.pts is not None:
            return frame.pts
        return self._rank

    def _decode(self, start: int) -> Iterator[av.VideoFrame]:
        for packet in self.timeline.packets[start:]:
            yield from self._context.decode(packet)
        yield from self._context.decode(None)


def _read(
    container: InputContainer,
    stream: VideoStream,
    limits: MediaConfig,
    count: int,
    rate: float,
    field: str,
    watch: Watch,
) -> Iterator[tuple[float, Image.Image]]:
    context = stream.codec_context
    if context is None or stream.time_base is None:
        raise InvalidArgument.of(field, "is compressed in a way that this server cannot decode")
    if not (context.width and context.height):  # not in the header, and FFmpeg refused to look into the frames
        raise InvalidArgument.of(field, f"has frames of no readable size, or of more than {limits.max_pixels} pixels")
    check_size((context.width, context.height), limits, field)
    timeline = _Timeline.of(container, stream, limits, field)
    seconds = float((timeline.end - timeline.times[0]) * stream.time_base)
    if seconds > limits.max_video_seconds:
        why = f"the limit is {limits.max_video_seconds:g} {named('max_video_seconds')}"
        raise InvalidArgument.of(field, f"lasts {seconds:.1f} seconds; {why}")
    pixels = len(timeline.packets) * context.width * context.height
    if pixels > limits.max_video_pixels:
        raise InvalidArgument.of(
            field,
            f"has {len(timeline.packets)} frames of {context.width} x {context.height} pixels; "
            f"the limit is {limits.max_video_pixels} pixels in all {named('max_video_pixels')}",
        )
    context.thread_type = "SLICE"  # frame threads may deadlock where decoding stops early
    context.thread_count = 1  # a clip takes one core, and no more than its share of the time
    if rate:
        count = min(count, max(1, round(rate * seconds)))
    wanted = spread(timeline.times, timeline.end, count)
    sampled = len(wanted) * context.width * context.height
    _check_sampled(sampled, limits, field)
    watch.reserve(sampled)
    decoder = _Decoder(stream, timeline, watch)
    held = 0
    found: set[int] = set()
    for index in wanted:
        frame = decoder.at(index)
        if frame is None:
            break
        if frame.is_corrupt:
            raise InvalidArgument.of(field, "is a damaged video: a frame cannot be decoded whole")
        check_size((frame.width, frame.height), limits, field)
        held += frame.width * frame.height  # which a stream may change on its way
        _check_sampled(held, limits, field)
        if held > sampled:
            watch.reserve(held - sampled)
            sampled = held
        shown = frame.pts if timeline.ordered and frame.pts is not None else timeline.times[index]
        if shown not in found:
            found.add(shown)
            yield float((shown - timeline.times[0]) * stream.time_base), _upright(frame)
    if not found:
        raise InvalidArgument.of(field, _NO_PACKETS)


def _check_sampled(pixels: int, limits: MediaConfig, field: str) -> None:
    if pixels > limits.max_sampled_pixels:
        why = f"the limit is {limits.max_sampled_pixels} {named('max_sampled_pixels')}: send it smaller"
        raise InvalidArgument.of(field, f"has {pixels} pixels in the frames that are looked at; {why}")


def _upright(frame: av.VideoFrame) -> Image.Image:
    """The frame as a picture, turned and mirrored as its display matrix says (``libavutil/display.h``)."""
    image = frame.to_image()
    image.info = {}
    side_data: Any = frame.side_data  # PyAV's stub knows of motion vectors only
    matrix = side_data.get(Type.DISPLAYMATRIX)
    if matrix is None:
        return image
    right_x, right_y, _u, down_x, down_y = struct.unpack_from("=5i", bytes(matrix))
    if abs(right_x) + abs(down_y) >= abs(right_y) + abs(down_x):
        turn = _STRAIGHT[right_x < 0, down_y < 0]
    else:
        turn = _TURNED[right_y < 0, down_x < 0]
    return image if turn is None else image.transpose(turn)


#: By the signs of where the picture's right and down edges point: along their own axes, or along each other's.
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


def _demuxer(data: bytes) -> str | None:
    """FFmpeg's demuxer for the container, from its first bytes alone: no other format is ever tried."""
    if data[:4] == _EBML:
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if data[4:8] == b"ftyp" and data[8:12] in STILL_BRANDS:
        return None
    return "mov" if data[4:8] in _BOXES else None


def _cut_off(data: bytes, demuxer: str) -> bool:
    """Whether the container's own sizes say that bytes are missing at the end; damaged sizes are not judged here."""
    if demuxer == "avi":
        return 8 + int.from_bytes(data[4:8], "little") > len(data) + 1  # the padding byte may be missing
    if demuxer == "matroska":
        at = data.find(_SEGMENT, 0, 4096)
        head = data[at + 4 : at + 12]
        if at < 0 or not head or not head[0]:
            return False
        width = 9 - head[0].bit_length()
        size = int.from_bytes(head[:width], "big") & ((1 << 7 * width) - 1)
        return size != (1 << 7 * width) - 1 and at + 4 + width + size > len(data)  # all ones = not known
    at = 0
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        if size == 0:
            return False  # up to the end of the file
        if size < 8:
            return False
        at += size
    return at > len(data)


def _looks_like(data: bytes) -> str:
    if data.startswith(_IMAGES) or data[8:12] == b"WEBP" or (data[4:8] == b"ftyp" and data[8:12] in STILL_BRANDS):
        return "an image"
    if data[:4] in (b"OggS", b"FLV\x01", b"fLaC") or data[:3] == b"ID3" or data[8:12] == b"WAVE":
        return "another media file"
    return "a file of unknown kind"


def _reason(error: BaseException) -> str:
    return error.strerror or "it cannot be read" if isinstance(error, FFmpegError) else str(error)
