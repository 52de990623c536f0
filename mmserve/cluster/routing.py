"""Routing of requests to workers: a pure function of their loads and cache contents."""

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

#: Maximum requests of a worker in a stage: others wait, so that they can still be sent elsewhere.
MAX_REQUESTS = {"encode": 4, "prefill": 8}
#: Cost of encoding a request without media: the unit of cost.
OF_TEXT = 1.0
#: Pixels of media whose encoding costs one unit, and pixels per byte of media of unknown size: photographs have about
#: ten bits per pixel, and a video has many frames in few bytes.
_PIXELS_A_UNIT, _PIXELS_A_BYTE = 100_000.0, 2.0


@dataclass(frozen=True)
class Candidate:
    """A worker that could run a request: its ``load``, and the cost that its caches save for the request (``saved``),
    both in units of cost."""

    name: str
    load: float
    saved: float = 0.0


def choose(candidates: Sequence[Candidate]) -> str | None:
    """The name of the worker with the least load minus savings; None if there are no candidates."""
    if not candidates:
        return None
    return min(candidates, key=lambda each: each.load - each.saved).name


def max_requests(roles: frozenset[str], role: str, running: int) -> int:
    """The maximum number of requests of a worker of ``roles`` that were sent for ``role``: they stay through its later
    stages, too. ``running``: number of answers that it decodes concurrently."""
    own = ROLES[ROLES.index(role) :]
    most = {**MAX_REQUESTS, "decode": running}
    total = 0
    for each in own:
        if each not in roles:
            break
        total += most[each]
    return total


def cost(role: str, handover: Handover) -> float:
    """The cost of a request in the stage of ``role``, comparable only within the stage."""
    if role == "encode":
        return OF_TEXT + sum(pixels(part) for part in _media(handover.request)) / _PIXELS_A_UNIT
    if role == "prefill":
        return float(max(1, handover.usage.prompt_tokens))
    return 1.0


def pixels(part: ImagePart | VideoPart) -> float:
    """Number of pixels of an image, from its file's header; for other media, that of an image of the same size in
    bytes."""
    if isinstance(part, ImagePart) and part.data:
        try:
            width, height = Image.open(BytesIO(part.data), formats=("PNG", "JPEG")).size
            return float(width * height)
        except Exception:  # noqa: BLE001 - errors of a file are reported by its decoder
            pass
    return len(part.data) * _PIXELS_A_BYTE


def shards(costs: Sequence[float], most: int) -> list[tuple[int, ...]]:
    """Partitions the indices of ``costs`` into at most ``most`` non-empty parts of similar sums: the most expensive
    first, each to the part with the smallest sum (Graham's longest processing time rule)."""
    parts: list[list[int]] = [[] for _ in range(min(most, len(costs)))]
    sums = [0.0] * len(parts)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = sums.index(min(sums))
        parts[least].append(i)
        sums[least] += costs[i]
    return [tuple(sorted(part)) for part in parts]


def sharded(request: Request, encoders: int, least: int) -> list[tuple[tuple[MediaShare, ...], Request]]:
    """The media of ``request`` in parts of similar cost for ``encoders`` workers, each with a request that has only its
    files; empty if there is only one image, or fewer than ``least`` pixels (0 = never split).

    A video that costs more than one encoder's share is split into proportionally many parts.
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
    """``request`` with only the media files at these indices."""
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
