"""Which worker a request goes to: a pure function of their loads and of what they keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import count
from math import ceil

from PIL import Image

from mmserve.core.handover import ROLES, Handover
from mmserve.core.request import ImagePart, Part, Request, VideoPart
from mmserve.core.share import MediaShare

#: Requests that a worker has in hand for a stage, at most: the others wait where they can still go elsewhere.
IN_HAND = {"encode": 4, "prefill": 8}
#: What a request without media costs to encode, by definition.
OF_TEXT = 1.0
#: Pixels of media that cost as much to encode as a request without any, and pixels of a byte of those that are not
#: known: some ten bits a pixel are usual in files of photographs, and a video's frames hide in few bytes.
_PIXELS_A_UNIT, _PIXELS_A_BYTE = 100_000.0, 2.0


@dataclass(frozen=True)
class Candidate:
    """A worker that could take a request: its ``load``, and what the request would cost less there because it keeps
    some of what would have to be computed (``saved``), both in units of cost."""

    name: str
    load: float
    saved: float = 0.0


def choose(candidates: Sequence[Candidate]) -> str | None:
    """The name of the worker with the least load, less what is saved there."""
    if not candidates:
        return None
    return min(candidates, key=lambda each: each.load - each.saved).name


def room(roles: frozenset[str], role: str, running: int) -> int:
    """How many requests a worker of ``roles`` has in hand at most, for those that come for ``role``: it keeps them
    through the stages after it that it runs, too. ``running``: answers that it decodes at once."""
    own = ROLES[ROLES.index(role) :]
    most = {**IN_HAND, "decode": running}
    total = 0
    for each in own:
        if each not in roles:
            break
        total += most[each]
    return total


def cost(role: str, handover: Handover) -> float:
    """What a request costs in the stage of ``role``, in units that only compare within the stage."""
    if role == "encode":
        return OF_TEXT + sum(pixels(part) for part in _media(handover.request)) / _PIXELS_A_UNIT
    if role == "prefill":
        return float(max(1, handover.usage.prompt_tokens))
    return 1.0


def pixels(part: ImagePart | VideoPart) -> float:
    """Pixels of an image, from its file's header; of anything else as many as images of so many bytes have."""
    if isinstance(part, ImagePart) and part.data:
        try:
            width, height = Image.open(BytesIO(part.data), formats=("PNG", "JPEG")).size
            return float(width * height)
        except Exception:  # noqa: BLE001 - what is wrong with a file its decoder finds
            pass
    return len(part.data) * _PIXELS_A_BYTE


def shards(costs: Sequence[float], most: int) -> list[tuple[int, ...]]:
    """The places of ``costs`` in at most ``most`` parts of like sums, none empty: the dearest first, each to the part
    that has least (Graham's rule for the longest processing times)."""
    parts: list[list[int]] = [[] for _ in range(min(most, len(costs)))]
    sums = [0.0] * len(parts)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = sums.index(min(sums))
        parts[least].append(i)
        sums[least] += costs[i]
    return [tuple(sorted(part)) for part in parts]


def sharded(request: Request, encoders: int, least: int) -> list[tuple[tuple[MediaShare, ...], Request]]:
    """The media of ``request`` in parts of like cost for so many ``encoders``, each with the request that has the files
    of no others; none where there is one image only, or less than ``least`` pixels (0 = never).

    A video that costs more than one encoder's share is cut into as many parts as it costs shares.
    """
    files = _media(request)
    costs = [pixels(part) for part in files]
    total = sum(costs)
    if not least or encoders < 2 or total < least:
        return []
    found: list[MediaShare] = []
    for place, (file, cost) in enumerate(zip(files, costs, strict=True)):
        of = min(encoders, ceil(cost * encoders / total)) if isinstance(file, VideoPart) else 1
        found += [MediaShare(place, part, of) for part in range(of)]
    if len(found) < 2:
        return []
    parts = shards([costs[share.place] / share.of for share in found], encoders)
    chosen = [tuple(found[i] for i in part) for part in parts]
    return [(own, _only(request, frozenset(share.place for share in own))) for own in chosen]


def _only(request: Request, chosen: frozenset[int]) -> Request:
    """``request`` with the files of the media at these places alone."""
    number = count()

    def kept(part: Part) -> Part:
        if not isinstance(part, ImagePart | VideoPart) or next(number) in chosen:
            return part
        return replace(part, data=b"")

    messages = (replace(message, parts=tuple(map(kept, message.parts))) for message in request.messages)
    return replace(request, messages=tuple(messages))


def _media(request: Request) -> list[ImagePart | VideoPart]:
    parts = (part for message in request.messages for part in message.parts)
    return [part for part in parts if isinstance(part, ImagePart | VideoPart)]
