"""An approximate index of the workers' caches: pages of prompts by their keys, media and prompt texts by hashes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from mmserve.core.request import MediaPart, Part, Request, TextPart, TokensPart

#: Number of characters of a prompt in one hashed chunk.
_CHARACTERS = 256


class Index:
    """The latest ``most`` entries sent to workers; a worker may have evicted one since."""

    def __init__(self, most: int = 1 << 15) -> None:
        self._most = most
        self._holders: OrderedDict[Hashable, set[str]] = OrderedDict()

    def record(self, entries: Iterable[Hashable], worker: str) -> None:
        """Record that ``worker`` has these entries."""
        for entry in entries:
            self._holders.setdefault(entry, set()).add(worker)
            self._holders.move_to_end(entry)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def share(self, entries: Sequence[Hashable], worker: str) -> float:
        """The share of ``entries`` that ``worker`` has, in [0, 1]."""
        return sum(self._has(entry, worker) for entry in entries) / len(entries) if entries else 0.0

    def leading(self, entries: Sequence[Hashable], worker: str) -> float:
        """The share of ``entries`` in the longest prefix of which ``worker`` has all."""
        count = next((i for i, entry in enumerate(entries) if not self._has(entry, worker)), len(entries))
        return count / len(entries) if entries else 0.0

    def dropped(self, entries: Iterable[Hashable]) -> None:
        """Remove the entries for all workers."""
        for entry in entries:
            self._holders.pop(entry, None)

    def worker_exited(self, worker: str) -> None:
        """``worker`` has exited: remove its entries."""
        for entry, holders in list(self._holders.items()):
            holders.discard(worker)
            if not holders:
                del self._holders[entry]

    def _has(self, entry: Hashable, worker: str) -> bool:
        return worker in self._holders.get(entry, ())


def media(request: Request) -> tuple[Hashable, ...]:
    """Keys of a request's media: hashes of their bytes, which Python caches."""
    parts = (part for message in request.messages for part in message.parts)
    return tuple(hash(part.data) for part in parts if isinstance(part, MediaPart) and part.data)


def beginning(request: Request) -> tuple[Hashable, ...]:
    """Keys of a prompt's prefixes, without tokenising it: a cumulative hash after each media file and after every chunk
    of text or token ids."""
    found: list[Hashable] = [hash((request.tenant.cache, request.adapter))]
    for message in request.messages:
        found.append(hash((found[-1], message.role)))
        for part in message.parts:
            for piece in _pieces(part):
                found.append(hash((found[-1], piece)))
    return tuple(found[1:])


def _pieces(part: Part) -> Iterable[Hashable]:
    """The contents of a part: text and token ids in pieces of ``_CHARACTERS``, a file as a whole."""
    match part:
        case TextPart(whole) | TokensPart(whole):
            return (whole[i : i + _CHARACTERS] for i in range(0, len(whole), _CHARACTERS))
    return (part.data,)
