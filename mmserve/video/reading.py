"""Decoding of frames from a client's pushes, in child processes (``encode/decoding.py``)."""

from __future__ import annotations

from collections.abc import Callable

from mmserve.encode.containers import needs_init
from mmserve.encode.decoders import Decoders
from mmserve.encode.sampling import Sampler
from mmserve.encode.segments import Segment, decode_segment
from mmserve.encode.wire import MediaFile
from mmserve.errors import InvalidArgument
from mmserve.models.picture import Resize
from mmserve.video.base import Frame
from mmserve.video.clock import clock_seconds
from mmserve.video.messages import Push, PushImage, PushSegment, push_field
from mmserve.video.overload import pixel_bytes

#: Maximum size of an initialisation segment, which is kept for the session; one or two thousand bytes are usual.
MAX_INIT_BYTES = 256 << 10


class PushReader:
    """The frames of one session's pushes, in order; not thread-safe.

    ``most_bytes``: limit of the frames of one push; ``resize``: the model's first step of preparing every frame.
    """

    def __init__(self, decoders: Decoders, sampler: Sampler, most_bytes: int, resize: Resize | None) -> None:
        self._decoders, self._sampler = decoders, sampler
        self._most_bytes, self._resize = most_bytes, resize
        self._init = b""  # the last initialisation segment
        self._end = 0.0  # end time of the last segment
        self._newest: float | None = None  # time of the newest frame

    def read(self, push: Push, take: Callable[[Frame], None], check: Callable[[], None]) -> None:
        """See ``Reader.read``; raises ``InvalidArgument`` for a push that cannot be decoded, or whose time is not after
        the previous one's.

        No frame of a refused push is used.
        """
        frames = self._image(push, check) if isinstance(push, PushImage) else self._segment(push, check)
        for frame in frames:
            self._newest = frame.seconds
            take(frame)

    def _image(self, push: PushImage, check: Callable[[], None]) -> list[Frame]:
        self._check_after(push.seconds, "push_image.seconds")
        file = MediaFile(push.data, clip=False, name=push_field(push), resize=self._resize)
        [pictures] = self._decoders.map([lambda decode: decode(file)], check)
        self._end = push.seconds + self._sampler.interval  # as for an image in ``push_segment``
        chosen = self._sampler.from_image(push.seconds, pictures.frames[0])
        return [Frame(push.seconds, chosen.image, chosen.detail)]

    def _segment(self, push: PushSegment, check: Callable[[], None]) -> list[Frame]:
        if len(push.init) > MAX_INIT_BYTES:
            why = f"has {len(push.init)} bytes; an initialisation segment has at most {MAX_INIT_BYTES}"
            raise InvalidArgument.of("push_segment.init", why)
        if push.init:
            self._init = push.init
        begin = self._end if push.start is None else push.start
        if push.start is not None:
            self._check_after(begin, "push_segment.start_seconds")
        segment = Segment(push.data, self._init if needs_init(push.data) else b"", begin)
        [(read, sampler)] = self._decoders.map(
            [
                lambda decode: decode_segment(
                    decode,
                    segment,
                    begin=begin,
                    sampler=self._sampler,
                    field=push_field(push),
                    resize=self._resize,
                )
            ],
            check,
        )
        if (size := sum(pixel_bytes(frame.image) for frame in read.frames)) > self._most_bytes:
            raise InvalidArgument.of(
                push_field(push),
                f"has {len(read.frames)} frames of {size} bytes to be looked at; the limit is {self._most_bytes} "
                "([video] waiting_bytes of the server): send shorter segments",
            )
        self._sampler, self._end = sampler, read.end
        return [Frame(each.seconds, each.image, each.detail) for each in read.frames]

    def _check_after(self, seconds: float, field: str) -> None:
        clock_seconds(seconds, field)
        if self._newest is not None and seconds <= self._newest:
            why = f"must be after {self._newest:g}, where the newest frame is, not {seconds:g}"
            raise InvalidArgument.of(field, why)
