"""The total memory of requests in progress: limiting the number of requests does not limit bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mmserve.core.request import MediaPart, Request, TextPart, TokensPart
from mmserve.errors import ResourceExhausted

#: Retry delay (seconds) for refused clients.
_RETRY_AFTER = 1.0
#: Bytes of texts that are not counted, and maximum bytes of a character and of a text object.
_UNCOUNTED = 1 << 16
_CHARACTER = 4
_TEXT = 512
_TOKEN = 40  # a tuple element, and an integer


class MemoryBudget:
    """``capacity`` bytes for the files and long texts of all requests in progress; used on one event loop.

    A file shared by several requests (an upload) counts once.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._held: Counter[int] = Counter()  # by how many, a file by its identity: it lives as long as it is held

    @contextmanager
    def taken(self, files: Sequence[bytes], texts: int = 0) -> Iterator[None]:
        """Context that holds ``files`` and ``texts`` bytes of texts; raises ``ResourceExhausted`` if they exceed the
        rest of the budget."""
        more = texts + sum({id(file): len(file) for file in files if id(file) not in self._held}.values())
        if self.used + more > self.capacity:
            raise ResourceExhausted(
                f"requests in progress hold {self.used} bytes of media, and media.live_bytes allows {self.capacity} "
                f"with the {more} of this one",
                retry_after=_RETRY_AFTER if more <= self.capacity else None,
            )
        self.used += more
        self._held.update(map(id, files))
        try:
            yield
        finally:
            self._held.subtract(map(id, files))
            gone = {id(file): len(file) for file in files if not self._held[id(file)]}
            self.used -= texts + sum(gone.values())
            for file in gone:
                del self._held[file]


def media_files(request: Request) -> list[bytes]:
    """The image and video files of ``request``."""
    return [part.data for message in request.messages for part in message.parts if isinstance(part, MediaPart)]


def text_bytes(request: Request) -> int:
    """Bytes of the messages of ``request`` without files, and of its stop strings; 0 below the uncounted amount."""
    parts = [part for message in request.messages for part in message.parts]
    texts = [len(part.text) if isinstance(part, TextPart) else 0 for part in parts]
    texts += map(len, request.sampling.stop)
    size = _CHARACTER * sum(texts) + _TEXT * len(texts)
    size += sum(_TOKEN * len(part.ids) for part in parts if isinstance(part, TokensPart))
    return size if size > _UNCOUNTED else 0
