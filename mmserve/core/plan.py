"""What the scheduler reads and what it decides: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmserve.core.request import RequestId, Stage


@dataclass(frozen=True)
class Entry:
    """One live request as the scheduler sees it; entries come in order of arrival."""

    id: RequestId
    stage: Stage
    images: int = 0  # and frames of videos
    tokens: int = 0  # positions of prompt and answer; known once encoded
    pages: int = 0  # K/V pages they need
    last_step: int = 0  # number of the decode batch it was last in
    prefilled: int | None = None  # positions run so far: it waits for its next chunk; None = it holds no pages yet
    constrained: bool = False  # it needs a grammar before anything else
    tenant: str = ""
    share: float = 1.0  # of the tenant, in fair queueing
    priority: int = 0  # class: lower ones are served first


@dataclass(frozen=True)
class Served:
    """What the queue of a stage has served: its virtual time, and that of each tenant that is ahead of it.

    See ``mmserve/schedule/fair.py``. Times are costs over shares.
    """

    time: float = 0.0
    tenants: Mapping[str, float] = field(default_factory=dict)

    def start(self, tenant: str) -> float:
        """The virtual time at which the next request of ``tenant`` begins."""
        return max(self.time, self.tenants.get(tenant, 0.0))


@dataclass(frozen=True)
class Budgets:
    """What may be used now."""

    idle: frozenset[str]  # stages whose worker is free: "constrain", "load", "tokenize", "encode", "prefill", "decode"
    free_pages: int
    handover: int  # requests that may wait behind constrain, for prefill, and for decode
    max_running: int  # requests that may hold pages
    encode_batch: int  # images and frames
    prefill_tokens: int
    decode_tokens: int
    constrain: int = 1  # requests whose constraints may be begun now
    load: int = 1  # requests whose media may be begun now
    served: Mapping[str, Served] = field(default_factory=dict)  # by each stage's queue so far


@dataclass(frozen=True)
class Plan:
    """Which requests each idle stage takes next, in order; empty = nothing to do."""

    constrain: tuple[RequestId, ...] = ()
    load: tuple[RequestId, ...] = ()
    tokenize: tuple[RequestId, ...] = ()
    encode: tuple[RequestId, ...] = ()
    prefill: tuple[RequestId, ...] = ()
    decode: tuple[RequestId, ...] = ()
    served: Mapping[str, Served] = field(default_factory=dict)  # by each stage's queue, these requests included
