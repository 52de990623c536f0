"""The scheduler's input and output: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmserve.core.request import RequestId, Stage


@dataclass(frozen=True)
class Entry:
    """The scheduler's view of one live request; entries are in order of arrival."""

    id: RequestId
    stage: Stage
    images: int = 0  # images and video frames
    tokens: int = 0  # positions of prompt and answer; known after encode
    pages: int = 0  # K/V pages they need
    turn: float = 0.0  # virtual time of its next decode step (``mmserve/schedule/turns.py``)
    prefilled: int | None = None  # positions run so far: waits for its next chunk; None = it holds no pages yet
    constrained: bool = False  # its grammar must be compiled first
    tenant: str = ""
    share: float = 1.0  # of the tenant, in fair queueing
    priority: int = 0  # priority class: lower ones are served first
    rows: int = 0  # rows of its next decode step; 0 = none, because prefill made its candidates
    due: float = 0.0  # deadline of its first token (seconds on the monotonic clock)
    pace: float = 1.0  # relative virtual time between two of its decode steps
    awaits: bool = False  # some rows of its prompt are not available yet, because its clip is still being read
    first_rows: int | None = None  # total rows of its prefill; None = all of its ``tokens``

    @property
    def prefill_rows(self) -> int:
        """Rows that prefill has left to run."""
        return (self.tokens if self.first_rows is None else self.first_rows) - (self.prefilled or 0)


@dataclass(frozen=True)
class Served:
    """The virtual time of a stage's queue, and of each tenant that is ahead of it.

    See ``mmserve/schedule/fair.py``. Times are costs divided by shares.
    """

    time: float = 0.0
    tenants: Mapping[str, float] = field(default_factory=dict)

    def start(self, tenant: str) -> float:
        """The virtual start time of the next request of ``tenant``."""
        return max(self.time, self.tenants.get(tenant, 0.0))


@dataclass(frozen=True)
class Budgets:
    """The capacity that is free now."""

    idle: frozenset[str]  # stages with a free worker: "constrain", "load", "tokenize", "encode", "prefill", "decode"
    free_pages: int
    max_pending_per_stage: int  # requests that may wait after constrain, for prefill, and for decode
    max_running: int  # requests that may hold pages
    encode_batch: int  # images and frames
    prefill_tokens: int  # rows of a prefill batch
    decode_tokens: int  # rows of a decode batch
    constrain: int = 1  # number of constraints that can be started now
    load: int = 1  # number of requests whose media can be loaded now
    served: Mapping[str, Served] = field(default_factory=dict)  # virtual times of each stage's queue
    chunked: bool = False  # prefill runs longer prompts in chunks of ``prefill_tokens``
    #: Rows of shorter requests that can run during the current pass, for each stage whose current pass is long.
    within: Mapping[str, int] = field(default_factory=dict)
    now: float = 0.0  # virtual time of decode


@dataclass(frozen=True)
class Plan:
    """The requests that each idle stage runs next, in order; empty = nothing to do."""

    constrain: tuple[RequestId, ...] = ()
    load: tuple[RequestId, ...] = ()
    tokenize: tuple[RequestId, ...] = ()
    encode: tuple[RequestId, ...] = ()
    prefill: tuple[RequestId, ...] = ()
    decode: tuple[RequestId, ...] = ()
    served: Mapping[str, Served] = field(default_factory=dict)  # of each stage's queue, including these requests
    within: Mapping[str, int] = field(default_factory=dict)  # see ``Budgets``; after this plan
    turns: Mapping[RequestId, float] = field(default_factory=dict)  # virtual time of each request's next step
    now: float = 0.0  # virtual time of decode, including this batch
