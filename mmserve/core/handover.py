"""A request on its way from one engine to another, for stages that live apart: plain data, with all that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmserve.core.events import Usage
from mmserve.core.payloads import CanvasPayload, EncodedPayload, KVChunk, PrefilledPayload, VisualPayload
from mmserve.core.progress import Milestone
from mmserve.core.request import Request, Stage

#: The three stages of serving, which an engine does all or some of.
ROLES = ("encode", "prefill", "decode")
#: What a request in each of these stages waits for; in the others it cannot leave.
NEXT_ROLE: Mapping[Stage, str] = {
    Stage.QUEUED: "encode",
    Stage.ENCODED: "prefill",
    Stage.PREFILLED: "decode",
    Stage.READY: "decode",
}


@dataclass(frozen=True)
class Handover:
    """A request, or one sample of it, between two stages or two decode steps.

    ``payload``: its state at ``stage``; None = nothing was done yet; visual tokens, where some of its media were shared
    out; K/V that go ahead of a prefilled request. Times are seconds: ``age`` since it arrived, ``reached`` from its
    arrival to each milestone, ``run`` in each stage.
    """

    request: Request
    stage: Stage
    payload: EncodedPayload | PrefilledPayload | CanvasPayload | VisualPayload | KVChunk | None
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    keys: tuple[bytes, ...] = ()  # of the prompt's pages that may be shared
    unpruned: bool = False  # the decoder has to prune its prompt before it takes pages
    sent: int = 0  # characters of the answer that were sent before
    age: float = 0.0
    run: Mapping[str, float] = field(default_factory=dict)
    reached: Mapping[Milestone, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Left:
    """The request, or sample, is not here any more: it goes on wherever ``handover`` is taken in."""

    handover: Handover
    sample: int = 0


@dataclass(frozen=True)
class Saved:
    """The request, or sample, goes on here, and could go on elsewhere from ``handover``, were this engine lost."""

    handover: Handover
    sample: int = 0


@dataclass(frozen=True)
class Ahead:
    """Some of the K/V of a request, or sample, whose prefill goes on here, and which then leaves: ``handover`` as it
    will leave, but with a ``KVChunk``; ``number`` counts those from 0."""

    handover: Handover
    number: int
    sample: int = 0
