"""Which worker probably keeps what: pages of prompts by their keys, media and the texts of prompts by hashes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from mmserve.core.request import MediaPart, Part, Request, TextPart, TokensPart

#: Characters of a prompt that are looked up as one.
_CHARACTERS = 256


class Index:
    """What each worker was given, of the latest ``most`` things; a worker may have dropped one since."""

    def __init__(self, most: int = 1 << 15) -> None:
        self._most = most
        self._holders: OrderedDict[Hashable, set[str]] = OrderedDict()

    def note(self, things: Iterable[Hashable], worker: str) -> None:
        """``worker`` has them from now on."""
        for thing in things:
            self._holders.setdefault(thing, set()).add(worker)
            self._holders.move_to_end(thing)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def share(self, things: Sequence[Hashable], worker: str) -> float:
        """The share of ``things`` that ``worker`` has, in [0, 1]."""
        return sum(self._has(thing, worker) for thing in things) / len(things) if things else 0.0

    def leading(self, things: Sequence[Hashable], worker: str) -> float:
        """The share of ``things`` that ``worker`` has from the first one on, without a gap."""
        count = next((i for i, thing in enumerate(things) if not self._has(thing, worker)), len(things))
        return count / len(things) if things else 0.0

    def dropped(self, things: Iterable[Hashable]) -> None:
        """No worker has them any more."""
        for thing in things:
            self._holders.pop(thing, None)

    def left(self, worker: str) -> None:
        """``worker`` has ended, and has nothing."""
        for thing, holders in list(self._holders.items()):
            holders.discard(worker)
            if not holders:
                del self._holders[thing]

    def _has(self, thing: Hashable, worker: str) -> bool:
        return worker in self._holders.get(thing, ())


def media(request: Request) -> tuple[Hashable, ...]:
    """What names the media of a request: hashes, which Python keeps with each file's bytes."""
    parts = (part for message in request.messages for part in message.parts)
    return tuple(hash(part.data) for part in parts if isinstance(part, MediaPart) and part.data)


def beginning(request: Request) -> tuple[Hashable, ...]:
    """What names the beginning of a prompt whose tokens are not known: a hash after each media file and after so many
    characters of text or token ids, each of all that comes before it, too."""
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
