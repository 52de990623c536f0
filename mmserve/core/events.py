"""Events of a request while it runs: plain data.

Order: one ``Admitted``, then for each sample one ``Prefilled`` if requested, any number of ``Snapshot``, ``Draft``,
``Delta`` and ``ToolCallDelta`` and one ``Finished``, with samples in any order; or, at any time after ``Admitted``, one
``Failed`` as the last event. ``sample`` counts from 0.
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
    """The current canvas as text; positions still masked are ``▒``.

    ``edited``: number of committed tokens that this step replaced; only policies that edit do so.
    """

    text: str
    committed: int
    total: int
    forwards: int
    edited: int = 0
    sample: int = 0


@dataclass(frozen=True)
class Alternative:
    """An alternative token of a position: its text alone, its log-probability before temperature and filters, and the
    bytes that it adds to the text, possibly part of a character."""

    id: int
    text: str
    log_probability: float
    text_bytes: bytes = b""


@dataclass(frozen=True)
class DraftAlternative:
    """An alternative token of a position of a draft: its text alone, and its probability, as ``confidence``."""

    id: int
    text: str
    probability: float


@dataclass(frozen=True)
class DraftPosition:
    """A position of the canvas, relative to the answer's start: its token, and that token's text alone.

    ``state``: ``masked`` (no candidate yet), ``draft`` (the latest candidate, which may change), ``committed``,
    ``edited`` (committed, and replaced since) or ``pinned`` (given with the request). ``confidence``: the latest
    probability of the token, in [0, 1]; 0 if masked, with ``id`` 0 and no text. ``alternatives``: the most probable
    tokens in descending order, as many as the request asks for.
    """

    index: int
    id: int
    text: str
    state: str
    confidence: float
    alternatives: tuple[DraftAlternative, ...] = ()


#: The fields of a ``DraftPosition``, with the fields of its alternatives.
DraftRow = tuple[int, int, str, str, float, Sequence[tuple[int, str, float]]]


@dataclass(frozen=True)
class Draft:
    """The changes of the canvas since the previous draft of the sample; the first one has all positions.

    ``rows``: one plain tuple for each position, in order, because there may be hundreds in each step. ``total``: number
    of positions of the canvas. ``forwards``: passes so far.
    """

    rows: tuple[DraftRow, ...]
    total: int
    forwards: int
    sample: int = 0

    @property
    def positions(self) -> tuple[DraftPosition, ...]:
        """``rows`` as objects with named fields."""
        return tuple(DraftPosition(*row[:-1], tuple(starmap(DraftAlternative, row[-1]))) for row in self.rows)

    def after(self, earlier: Draft) -> Draft:
        """The draft that merges ``earlier`` and this one, which follows it."""
        both = {row[0]: row for row in (*earlier.rows, *self.rows)}
        return replace(self, rows=tuple(both[index] for index in sorted(both)))


@dataclass(frozen=True)
class Delta:
    """Final text, which follows all text of its sample sent before; never retracted."""

    text: str
    sample: int = 0


@dataclass(frozen=True)
class ToolCallDelta:
    """A part of tool call ``index``: its ``id`` and ``name`` in the first delta, then text of its ``arguments``; never
    retracted."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    sample: int = 0


@dataclass(frozen=True)
class StageTimes:
    """Durations of a request (milliseconds). ``queue``: total wait before and between stages.

    From arrival: ``first_draft`` to the first candidates for the answer, which may change; ``first_commit`` to its
    first final position, anywhere in the answer; ``first_token`` to its first final text.
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
    """Token counts of one sample: the prompt with its visual tokens, the visual tokens alone, and the answer.

    The prompt is counted in every sample of a request. ``visual_tokens_before``: visual tokens before pruning.
    ``cached_tokens``: prompt tokens whose K/V came from the prefix cache. ``kv_positions``: positions with K/V when the
    answer ended. ``reused_tokens``: prompt tokens whose K/V were reused from an image alone, and not recomputed before
    the answer began.
    """

    prompt_tokens: int
    visual_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    visual_tokens_before: int = 0
    kv_positions: int = 0
    reused_tokens: int = 0


@dataclass(frozen=True)
class PromptText:
    """A prompt as its token ids, with placeholders for visual tokens, and as text with special tokens."""

    ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class PromptToken:
    """One token of the prompt: its text alone, its log-probability given the tokens before it, without penalties and
    logit bias, and its rank among all tokens, from 1 for the most probable one.

    ``log_probability``: None for the first token, for visual tokens, and if no pass of the request predicts it; its
    rank is then 0. ``alternatives`` and ``text_bytes``: as of ``CommittedToken``.
    """

    id: int
    text: str
    log_probability: float | None = None
    rank: int = 0
    alternatives: tuple[Alternative, ...] = ()
    text_bytes: bytes = b""


@dataclass(frozen=True)
class Prefilled:
    """The prompt has been run: ``usage`` has its tokens, and none of the answer.

    ``prompt_ids`` and ``prompt_text``: see ``PromptText``; empty unless requested, like ``prompt_tokens``.
    """

    usage: Usage
    sample: int = 0
    prompt_ids: tuple[int, ...] = ()
    prompt_text: str = ""
    prompt_tokens: tuple[PromptToken, ...] = ()


@dataclass(frozen=True)
class CommittedToken:
    """One token of the answer: its text alone, its log-probability before temperature and filters, and the number of
    forward passes up to the one that committed or last replaced it.

    ``alternatives``: the most probable tokens of its position in that pass, as many as the request asks for; empty if
    the token was known before the pass. ``text_bytes``: its UTF-8 bytes in the text; if a character spans several
    tokens, each has a part of its bytes, and U+FFFD as ``text``. For a special token, its name.
    """

    id: int
    text: str
    log_probability: float
    step: int
    alternatives: tuple[Alternative, ...] = ()
    text_bytes: bytes = b""


@dataclass(frozen=True)
class ConstraintStats:
    """The cost of a constraint for one sample. Seconds are CPU time of the decode thread."""

    steps: int  # steps in which the constraint chose tokens
    fallbacks: int  # steps after which the previous witness was kept, because no new one was completed
    late: int  # fallbacks in which the search ran out of time
    search_seconds: float  # total of all steps: masks, ranking, search and choice
    forward_seconds: float  # total of the passes without the output layer, including requests that shared them
    step_ms: tuple[float, ...] = field(default=(), repr=False)  # of each step, as in search_seconds


@dataclass(frozen=True)
class Finished:
    """The whole answer of a sample.

    ``reason``: ``end`` (end of text), ``stop`` (a stop string), ``length``, or ``tool_calls`` (the answer ends with
    tool calls: ``text`` is the text before ``tool_calls``). ``tokens`` is empty unless requested.
    """

    reason: str
    text: str
    usage: Usage
    forwards: int
    recomputed_tokens: int
    times: StageTimes
    warnings: tuple[str, ...] = field(default=())
    edits: int = 0  # number of committed tokens that were replaced
    tokens: tuple[CommittedToken, ...] = field(default=())
    sample: int = 0
    closed_by_budget: bool = False  # a constrained answer was shortened to end within its budget
    companion_forwards: int = 0  # passes that drafted or verified, not counted in ``forwards``
    log_weight: float | None = None  # importance weight (natural log) of an answer sampled under a constraint
    constraint: ConstraintStats | None = None  # of a constrained request
    holes: tuple[str, ...] = field(default=())  # the text of each hole of a template
    tool_calls: tuple[ToolCall, ...] = field(default=())
    cut_call: ToolCall | None = None  # one after them that the stop string or the length cut
    decisions: tuple[Decided, ...] = field(default=())  # of a request with typed questions, in their order
    stop: str = ""  # the stop string that ended it, if the reason is ``stop``
    end_token: CommittedToken | None = None  # after ``tokens``, if the reason is ``end``; not in a template

    @property
    def tokens_per_forward(self) -> float:
        """Completion tokens divided by forward passes."""
        return self.usage.completion_tokens / max(1, self.forwards)


@dataclass(frozen=True)
class Failed:
    """The request ended without an answer, or without all of its samples."""

    error: MMServeError


Event = Admitted | Prefilled | Snapshot | Draft | Delta | ToolCallDelta | Finished | Failed


#: Scored tokens and alternatives from which it takes milliseconds to convert an event to a message or to JSON.
LARGE = 1 << 12


def scored(event: Event) -> int:
    """Number of tokens with log-probabilities in ``event``, and of their alternatives, of which the last token has the
    most."""
    if isinstance(event, Finished):
        tokens: Sequence[CommittedToken | PromptToken] = event.tokens
    else:
        tokens = event.prompt_tokens if isinstance(event, Prefilled) else ()
    return len(tokens) * (1 + len(tokens[-1].alternatives)) if tokens else 0
