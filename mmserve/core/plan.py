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
    turn: float = 0.0  # virtual time at which its next decode step is due (``mmserve/schedule/turns.py``)
    prefilled: int | None = None  # positions run so far: it waits for its next chunk; None = it holds no pages yet
    constrained: bool = False  # it needs a grammar before anything else
    tenant: str = ""
    share: float = 1.0  # of the tenant, in fair queueing
    priority: int = 0  # class: lower ones are served first
    rows: int = 0  # that its next decode step runs; 0 = none, prefill has made its candidates
    due: float = 0.0  # when its first token is wanted (seconds on the monotonic clock)
    pace: float = 1.0  # share of the usual virtual time between two of its decode steps
    awaits: bool = False  # rows of its prompt that are not there yet, while its clip is read
    first_rows: int | None = None  # rows of its prefill, counted from the first position; None = all of its ``tokens``

    @property
    def prefill_rows(self) -> int:
        """Rows that prefill has left to run."""
        return (self.tokens if self.first_rows is None else self.first_rows) - (self.prefilled or 0)


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
    max_pending_per_stage: int  # requests that may wait after constrain, for prefill, and for decode
    max_running: int  # requests that may hold pages
    encode_batch: int  # images and frames
    prefill_tokens: int  # rows of a prefill batch
    decode_tokens: int  # rows of a decode batch
    constrain: int = 1  # requests whose constraints may be begun now
    load: int = 1  # requests whose media may be begun now
    served: Mapping[str, Served] = field(default_factory=dict)  # by each stage's queue so far
    chunked: bool = False  # prefill runs longer prompts in chunks of ``prefill_tokens``
    #: Rows that shorter requests may run during the pass in progress, for each stage where that is a long one.
    within: Mapping[str, int] = field(default_factory=dict)
    now: float = 0.0  # virtual time of decode


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
    within: Mapping[str, int] = field(default_factory=dict)  # as of ``Budgets``, once the plan is carried out
    turns: Mapping[RequestId, float] = field(default_factory=dict)  # when each request of the decode batch is due next
    now: float = 0.0  # virtual time of decode, this batch included
