"""A request in transit between engines that run different stages: plain data that contains its whole state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmserve.core.events import PromptText, Usage
from mmserve.core.payloads import CanvasPayload, EncodedPayload, KVChunk, PrefilledPayload, VisualPayload
from mmserve.core.progress import Milestone
from mmserve.core.request import Request, Stage

#: The three stages of serving; an engine runs some or all of them.
ROLES = ("encode", "prefill", "decode")
#: Stages in which a request can leave an engine, and what it waits for there.
NEXT_ROLE: Mapping[Stage, str] = {
    Stage.QUEUED: "encode",
    Stage.ENCODED: "prefill",
    Stage.PREFILLED: "decode",
    Stage.READY: "decode",
}


@dataclass(frozen=True)
class Handover:
    """A request, or one of its samples, between two stages or two decode steps.

    ``payload``: its state at ``stage``; None = not started; visual tokens, if its media were encoded by several
    engines; or K/V sent ahead of a prefilled request. Times are in seconds: ``age`` since it arrived, ``reached`` from
    its arrival to each milestone, ``run`` in each stage.
    """

    request: Request
    stage: Stage
    payload: EncodedPayload | PrefilledPayload | CanvasPayload | VisualPayload | KVChunk | None
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    keys: tuple[bytes, ...] = ()  # of the prompt's pages that can be shared
    unpruned: bool = False  # the decoder must prune its prompt before pages are allocated
    prompt: PromptText | None = None  # if requested; known once encoded
    sent: int = 0  # characters of the answer already sent
    age: float = 0.0
    run: Mapping[str, float] = field(default_factory=dict)
    reached: Mapping[Milestone, float] = field(default_factory=dict)


@dataclass(frozen=True)
class HandedOver:
    """The request, or sample, has left this engine: it continues where ``handover`` is received."""

    handover: Handover
    sample: int = 0


@dataclass(frozen=True)
class Saved:
    """The request, or sample, continues here; ``handover`` is a checkpoint from which another engine can continue
    it."""

    handover: Handover
    sample: int = 0


@dataclass(frozen=True)
class Ahead:
    """Some K/V of a request, or sample, whose prefill continues here before it leaves: ``handover`` as it will leave,
    with a ``KVChunk`` as payload; ``number`` counts chunks from 0."""

    handover: Handover
    number: int
    sample: int = 0
