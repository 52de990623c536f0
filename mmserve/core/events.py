"""Events of a request while it runs: plain data, in this order:
one ``Admitted``, then for each sample one ``Prefilled`` if it is asked for, any number of ``Snapshot``, ``Draft``,
``Delta`` and ``ToolCallDelta`` and one ``Finished``, the samples in any order; or, at any time after ``Admitted``, one
``Failed`` and nothing more. ``sample`` counts from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap

from mmserve.core.decisions import Decided
from mmserve.core.tools import ToolCall
from mmserve.errors import MMServeError


@dataclass(frozen=True)
class Admitted:
    """The request was accepted and waits for its first stage."""

    queued_ahead: int


@dataclass(frozen=True)
class Snapshot:
    """The canvas as it is now; positions still masked appear as ``▒`` and may become anything.

    ``edited``: committed tokens that this step replaced, which only policies that declare it do.
    """

    text: str
    committed: int
    total: int
    forwards: int
    edited: int = 0
    sample: int = 0


@dataclass(frozen=True)
class Alternative:
    """A possible token of a position: its text alone, its log-probability before temperature and filters, and the
    bytes that it adds to the text, which may be a part of a character."""

    id: int
    text: str
    log_probability: float
    text_bytes: bytes = b""


@dataclass(frozen=True)
class DraftAlternative:
    """A possible token of a position of a draft: its text alone, and its probability, as ``confidence``."""

    id: int
    text: str
    probability: float


@dataclass(frozen=True)
class DraftPosition:
    """A position of the canvas, counted from the answer's start: its token with the text that it has alone.

    ``state``: ``masked`` (nothing is known of it), ``draft`` (the latest candidate, which may change), ``committed``,
    ``edited`` (committed, and replaced since) or ``pinned`` (given with the request). ``confidence``: the probability
    of the token when it was last judged, in [0, 1]; 0 where it is masked, with ``id`` 0 and no text.
    ``alternatives``: the most probable tokens in falling order, so many as the request asks for.
    """

    index: int
    id: int
    text: str
    state: str
    confidence: float
    alternatives: tuple[DraftAlternative, ...] = ()


#: The fields of a ``DraftPosition``, its alternatives with the fields of theirs.
DraftRow = tuple[int, int, str, str, float, Sequence[tuple[int, str, float]]]


@dataclass(frozen=True)
class Draft:
    """What changed of the canvas since the draft before it; all of it in the first of a sample.

    ``rows``: a position each, in order, as plain tuples: there may be hundreds of them at each step. ``total``:
    positions of the canvas. ``forwards``: passes made so far.
    """

    rows: tuple[DraftRow, ...]
    total: int
    forwards: int
    sample: int = 0

    @property
    def positions(self) -> tuple[DraftPosition, ...]:
        """``rows`` by the names of their fields."""
        return tuple(DraftPosition(*row[:-1], tuple(starmap(DraftAlternative, row[-1]))) for row in self.rows)

    def after(self, earlier: Draft) -> Draft:
        """One draft in place of ``earlier`` and this one, which follows it."""
        both = {row[0]: row for row in (*earlier.rows, *self.rows)}
        return replace(self, rows=tuple(both[index] for index in sorted(both)))


@dataclass(frozen=True)
class Delta:
    """Text that is final and follows all text of its sample sent before; never taken back."""

    text: str
    sample: int = 0


@dataclass(frozen=True)
class ToolCallDelta:
    """More of the tool call number ``index``: its ``id`` and ``name`` with the first delta, then text of its
    ``arguments``; never taken back."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    sample: int = 0


@dataclass(frozen=True)
class StageTimes:
    """Where a request's time went (milliseconds). ``queue`` is the wait before and between stages.

    From arrival: ``first_draft`` to the first candidates for the answer, which may yet change; ``first_commit`` to its
    first final position, wherever it is; ``first_token`` to its first final text.
    """

    queue: float = 0.0
    encode: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    total: float = 0.0
    first_token: float = 0.0
    first_draft: float = 0.0
    first_commit: float = 0.0


@dataclass(frozen=True)
class Usage:
    """Token counts: the prompt with its visual tokens, the visual ones alone, and the answer up to its end.

    ``visual_tokens_before``: how many visual ones there were before pruning.

    Of one sample: the prompt, the same for all samples of a request, is counted in each.
    ``cached_tokens`` of the prompt's were not run: an earlier request with the same beginning had left their K/V.
    ``kv_positions``: positions whose K/V were held when the answer ended.
    ``reused_tokens`` of the prompt's were not run before the answer began: their K/V were taken from where the
    image stood alone.
    """

    prompt_tokens: int
    visual_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    visual_tokens_before: int = 0
    kv_positions: int = 0
    reused_tokens: int = 0


@dataclass(frozen=True)
class Prefilled:
    """The prompt has been run: ``usage`` has its tokens, and none of the answer."""

    usage: Usage
    sample: int = 0


@dataclass(frozen=True)
class CommittedToken:
    """One token of the answer: its text alone, its log-probability before temperature and filters, and the number of
    forward passes made when it was committed, or last replaced.

    ``alternatives``: the most probable tokens of its position in that pass, so many as the request asks for; none where
    the token was known before it. ``text_bytes``: what it adds to the text, in UTF-8: of a character that spans tokens
    each has a part, whose ``text`` is U+FFFD. Of a special token, which is no text, it is the name.
    """

    id: int
    text: str
    log_probability: float
    step: int
    alternatives: tuple[Alternative, ...] = ()
    text_bytes: bytes = b""


@dataclass(frozen=True)
class ConstraintStats:
    """What a constraint took of a sample. Seconds are processor time of the thread that decodes."""

    steps: int  # forward passes that the constraint chose from
    fallbacks: int  # steps after which the answer known before stayed: a better one was begun, and none could be ended
    late: int  # those of them whose time was over before the search was
    search_seconds: float  # of all steps: masks, ranking, search and choice
    forward_seconds: float  # of the passes, without the vocabulary's head; of all requests that shared them
    step_ms: tuple[float, ...] = field(default=(), repr=False)  # of each step, as in search_seconds


@dataclass(frozen=True)
class Finished:
    """The whole answer, or a sample of it. ``reason`` is ``end`` (end of text), ``stop`` (a stop string), ``length``,
    or ``tool_calls`` (end of an answer that calls tools: ``text`` is what comes before ``tool_calls``).

    ``tokens`` is empty unless the request asked for them.
    """

    reason: str
    text: str
    usage: Usage
    forwards: int
    recomputed_tokens: int
    times: StageTimes
    warnings: tuple[str, ...] = field(default=())
    edits: int = 0  # committed tokens that were replaced on the way
    tokens: tuple[CommittedToken, ...] = field(default=())
    sample: int = 0
    closed_by_budget: bool = False  # a constrained answer was made shorter than the model's, so that it ends in time
    companion_forwards: int = 0  # passes that drafted or judged for it, which ``forwards`` does not count
    log_weight: float | None = None  # importance weight (natural log) of an answer drawn true to the model
    constraint: ConstraintStats | None = None  # of a constrained request
    holes: tuple[str, ...] = field(default=())  # what fills each hole of a template
    tool_calls: tuple[ToolCall, ...] = field(default=())
    decisions: tuple[Decided, ...] = field(default=())  # of a request with typed questions, in their order
    stop: str = ""  # the stop string that ended it, where the reason is ``stop``

    @property
    def tokens_per_forward(self) -> float:
        """Completion tokens over forward passes."""
        return self.usage.completion_tokens / max(1, self.forwards)


@dataclass(frozen=True)
class Failed:
    """The request ended without an answer, or without all of its samples."""

    error: MMServeError


Event = Admitted | Prefilled | Snapshot | Draft | Delta | ToolCallDelta | Finished | Failed
