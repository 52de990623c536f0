"""A live request as the engine keeps it: one state until it is encoded, then one for each of its samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mmserve.config import EngineConfig
from mmserve.constraint.limits import WAITING
from mmserve.core.cancellation import Cancellation
from mmserve.core.constraint import ConstraintSampling
from mmserve.core.events import Event, Finished, StageTimes, Usage
from mmserve.core.handover import Ahead, Handover, Left, Saved
from mmserve.core.payloads import CanvasPayload, EncodedPayload, PrefilledPayload
from mmserve.core.plan import Entry
from mmserve.core.progress import Milestone, Progress, Reached, StageEntered, StepTaken
from mmserve.core.request import ImagePart, Request, RequestId, Stage, VideoPart
from mmserve.core.samples import samples
from mmserve.decode.state import Answer, Stepped
from mmserve.errors import InvalidArgument
from mmserve.kv.pool import pages_for
from mmserve.kv.table import PageTable
from mmserve.schedule.deadlines import due, pace
from mmserve.schedule.fair import aged
from mmserve.stages.prompt import EncodedPrompt

#: Gets what is for the client and, of a request with a ``trace``, its progress.
ClientSink = Callable[[Event | Progress], None]
#: The same where stages are apart: it gets the request's state, too.
Sink = Callable[[Event | Progress | Left | Saved | Ahead], None]
Payload = EncodedPayload | PrefilledPayload | CanvasPayload
#: Requests whose media are read at once; how many files are decoded at once is up to ``[media] decode_workers``.
LOADS = 8
#: The stages of media alone: they run at a low priority, and text does not wait for them.
MEDIA_WORKERS = frozenset({"load", "encode"})
#: The stages that have workers, and the jobs that each runs at once: a constraint mostly waits for its child process,
#: and so do media.
WORKERS = {"constrain": WAITING, "load": LOADS, "tokenize": 1, "encode": 1, "prefill": 1, "decode": 1}


@dataclass(eq=False)
class RequestGroup:
    """What all samples of a request share: who asked, when, and whether it failed, which ends them all."""

    id: RequestId
    sink: Sink
    arrived: float
    failed: bool = False  # the client has its error; workers may still hold some of its samples
    members: list[RequestState] = field(default_factory=list, repr=False)  # those that have not ended
    cancellation: Cancellation = field(default_factory=Cancellation)  # ends what workers do for it, where they look


@dataclass(eq=False)
class RequestState:
    """A request, or once it is encoded one sample of it, as the engine keeps it."""

    request: Request
    group: RequestGroup
    sample: int = 0
    stage: Stage = Stage.QUEUED
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    keys: tuple[bytes, ...] = ()  # of the prompt's pages that may be shared; known once encoded
    pages: PageTable = field(default_factory=PageTable)
    unpruned: bool = False  # the decoder has to prune its prompt before it takes pages
    turn: float = 0.0  # virtual time at which its next decode step is due
    rows: int | None = None  # that its next decode step runs; None = not known, as before its first one
    holds: int = 0  # workers whose batches have it, and have not reported yet
    #: Rows of the prompt that are final while its clip is read, and it is prefilled meanwhile; None = all.
    final: int | None = None
    fetching: bool = False  # pages of its prompt are looked for beyond the pool: prefill waits
    again: bool = False  # the clip turned out to be another: it goes back to where its media are loaded
    prefilled: int | None = None  # positions run, while some of the prompt is left; None = none is, or all
    run: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WORKERS, 0.0))  # seconds in each stage
    reached: dict[Milestone, float] = field(default_factory=dict)  # when, on the monotonic clock (seconds)
    steps: int = 0  # decode steps here
    _images: int | None = field(default=None, repr=False)  # counted once: there may be thousands of parts
    packed: Payload | None = None  # its state as it leaves, or is saved; made on the worker's thread

    @property
    def aborted(self) -> bool:
        """Whether the client has its error: the state is only here because a worker still holds its state."""
        return self.group.failed

    @property
    def in_flight(self) -> bool:
        """Whether a worker has it: its stage's batch has not reported yet."""
        return self.holds > 0

    def awaits(self, page_size: int, prefill_tokens: int) -> bool:
        """Whether rows of its next chunk of prefill, or pages of its prompt, are still on their way."""
        begin = len(self.keys) * page_size if self.prefilled is None else self.prefilled
        return self.again or self.fetching or (self.final is not None and self.final < begin + prefill_tokens)

    @property
    def waits(self) -> bool:
        """Whether it begins only when the samples before it have ended: it learns from them."""
        constraint = self.request.constraint
        learns = constraint is not None and constraint.sampling is ConstraintSampling.ASAP
        return learns and any(other.sample < self.sample for other in self.group.members)

    @property
    def due(self) -> float:
        """When its first token is wanted, on the monotonic clock (seconds)."""
        return due(self.group.arrived, self.request.deadline, self.request.slo)

    @property
    def samples(self) -> int:
        """Samples that it represents."""
        return self.request.sampling.n

    @property
    def work(self) -> int:
        """Tokens that it asks for, all samples together."""
        return self.samples * self.request.sampling.max_new_tokens

    @property
    def tokens(self) -> int:
        """Positions of prompt and answer; the prompt's are known once encoded."""
        return self.usage.prompt_tokens + self.request.sampling.max_new_tokens

    def pages_wanted(self, page_size: int) -> int:
        """Pages that hold its K/V, each sequence's own; none as long as it is not known what of its prompt is left."""
        return 0 if self.unpruned else self.request.sequences * pages_for(self.tokens, page_size)

    def too_large(self, config: EngineConfig) -> InvalidArgument | None:
        """Why a request that needs more pages than there are is refused: it would wait for them for good."""
        wanted = self.pages_wanted(config.page_size)
        if wanted <= config.pages:
            return None
        if self.request.decisions:
            needed = f"{len(self.request.decisions)} questions need {wanted} K/V pages, and there are {config.pages}"
            return InvalidArgument.of("questions", f"{needed}: ask fewer at once, or shorten them or the context")
        why = (
            f"{self.tokens} positions of {self.request.sequences} sequences need {wanted} K/V pages, and there are "
            f"{config.pages}: leave out cfg_scale, or shorten the prompt or max_new_tokens"
        )
        return InvalidArgument.of("diffusion.cfg_scale", why)

    def entry(
        self, page_size: int, frames_per_video: int, prefill_tokens: int, now: float, *, causal: bool = False
    ) -> Entry:
        """What the scheduler sees; a video counts as its frames, as far as the request has it.

        ``now`` is on the monotonic clock (seconds). ``causal``: prefill runs the prompt without the masked answer.
        """
        if self._images is None:
            parts = [part for message in self.request.messages for part in message.parts]
            self._images = sum(isinstance(part, ImagePart) for part in parts)
            self._images += sum(_frames(part, frames_per_video) for part in parts if isinstance(part, VideoPart))
        tokens = self.request.sequences * self.tokens
        return Entry(
            self.request.id,
            self.stage,
            self._images,
            tokens,
            self.pages_wanted(page_size),
            self.turn,
            self.prefilled,
            self.request.constraint is not None,
            self.request.tenant.name,
            self.request.tenant.share,
            aged(self.request.tenant.priority, now - self.group.arrived),
            tokens if self.rows is None else self.rows,
            due=self.due,
            pace=pace(self.request.slo),
            awaits=self.awaits(page_size, prefill_tokens),
            first_rows=self.request.sequences * self.usage.prompt_tokens if causal else None,
        )

    def know(self, handover: Handover) -> None:
        """Take over what is known of it where it comes from."""
        self.usage, self.keys, self.unpruned = handover.usage, handover.keys, handover.unpruned
        self.run.update(handover.run)
        self.reached.update({name: self.group.arrived + after for name, after in handover.reached.items()})

    def split(self) -> list[RequestState]:
        """A state for each sample, at the stage of this one, which is not needed any more."""
        self.group.members = [
            RequestState(one, self.group, i, self.stage, self.usage, self.keys, turn=self.turn, run=dict(self.run))
            for i, one in enumerate(samples(self.request))
        ]
        return self.group.members

    def enter(self, stage: Stage) -> None:
        """Be at ``stage`` from now on."""
        self.stage = stage
        if self.request.trace:
            self.group.sink(StageEntered(stage, time.time_ns(), self.sample))

    def reach(self, milestone: Milestone) -> None:
        """Note a milestone, the first time."""
        if milestone in self.reached:
            return
        self.reached[milestone] = time.monotonic()
        if self.request.trace:
            self.group.sink(Reached(milestone, time.time_ns(), self.sample))

    def stepped(self, outcome: Stepped) -> None:
        """Note what a decode step gave."""
        if "text" not in self.reached:
            self.reach("draft")
            if outcome.committed:
                self.reach("commit")
            if outcome.delta:
                self.reach("text")
        if outcome.step is not None:
            self.group.sink(StepTaken(outcome.step, time.time_ns(), self.sample))

    def finished(self, reason: str, answer: Answer, now: float) -> Finished:
        """The event that ends it; ``now`` is on the monotonic clock (seconds)."""
        usage = replace(self.usage, completion_tokens=answer.completion_tokens, kv_positions=answer.kv_positions)
        of_usage = ("completion_tokens", "kv_positions")
        own = {name: value for name, value in vars(answer).items() if name not in of_usage}
        return Finished(reason=reason, usage=usage, times=self._times(now), sample=self.sample, **own)

    def _times(self, now: float) -> StageTimes:
        total = now - self.group.arrived
        first = [self.reached.get(each, now) - self.group.arrived for each in ("text", "draft", "commit")]
        encode = self.run["load"] + self.run["tokenize"] + self.run["encode"]
        run = [encode, self.run["prefill"], self.run["decode"]]  # waiting for a grammar is waiting
        seconds = (max(0.0, total - sum(run)), *run, total, *first)  # a long clip is read while it is prefilled
        return StageTimes(*(round(1000 * s, 3) for s in seconds))


def _frames(video: VideoPart, usual: int) -> int:
    """Frames of a video that are looked at, as far as that is known before it is opened; else ``usual``."""
    return usual if video.sampling is None else video.sampling.frames or usual


def open_group(request: Request, sink: Sink, arrived: float) -> RequestState:
    """The first state of a request that comes in; ``arrived`` is on the monotonic clock (seconds)."""
    group = RequestGroup(request.id, sink, arrived, cancellation=Cancellation(request.deadline))
    state = RequestState(request, group)
    group.members.append(state)
    return state


def pass_size(stage: str, states: Sequence[RequestState], outcomes: Sequence[object]) -> int:
    """What a batch of a stage took its time for: rows of decode, tokens of prompts, visual tokens. 0 = it cannot be
    compared with others, as work on media and constraints, or a batch of which something failed."""
    if any(isinstance(outcome, BaseException) for outcome in outcomes):
        return 0
    if stage == "decode":
        return sum(state.rows or 1 for state in states)
    if stage == "prefill":
        return sum(state.usage.prompt_tokens for state in states)
    if stage == "encode":
        return sum(outcome.usage.visual_tokens_before for outcome in outcomes if isinstance(outcome, EncodedPrompt))
    return 0
