"""Frames of what a client pushes, decoded in child processes (``encode/decoding.py``)."""

from __future__ import annotations

from collections.abc import Callable

from mmserve.encode.decoding import Decoders
from mmserve.encode.wire import MediaFile
from mmserve.errors import Unimplemented
from mmserve.video.base import Frame
from mmserve.video.messages import Push, PushImage


class PushReader:
    """The frames of one session's pushes, in order; used by one thread at a time."""

    def __init__(self, decoders: Decoders) -> None:
        self._decoders = decoders

    def read(self, push: Push, take: Callable[[Frame], None], check: Callable[[], None]) -> None:
        """As ``Reader.read``; raises ``InvalidArgument`` for what cannot be decoded."""
        if isinstance(push, PushImage):
            file = MediaFile(push.data, clip=False, name="push_image.data")
            [pictures] = self._decoders.map([lambda decode: decode(file)], check)
            take(Frame(push.seconds, pictures.frames[0]))
            return
        raise Unimplemented("segments cannot be decoded yet; push images")
