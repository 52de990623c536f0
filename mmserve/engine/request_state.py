"""The engine's state of a live request: one object until it is encoded, then one for each of its samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mmserve.config import EngineConfig
from mmserve.constraint.limits import WAITING
from mmserve.core.cancellation import Cancellation
from mmserve.core.constraint import ConstraintSampling
from mmserve.core.events import Event, Finished, PromptText, StageTimes, Usage
from mmserve.core.handover import Ahead, HandedOver, Handover, Saved
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
from mmserve.schedule.expected_wait import work_of
from mmserve.schedule.fair import aged
from mmserve.stages.prompt import EncodedPrompt

#: Receives the client's events and, for a request with a ``trace``, its progress.
ClientSink = Callable[[Event | Progress], None]
#: The same with stages in several engines: also receives handovers.
Sink = Callable[[Event | Progress | HandedOver | Saved | Ahead], None]
Payload = EncodedPayload | PrefilledPayload | CanvasPayload
#: Number of requests whose media are loaded concurrently; ``[media] decode_workers`` limits concurrent files.
LOADS = 8
#: The stages of media: they run at a low priority, and text requests do not wait for them.
MEDIA_WORKERS = frozenset({"load", "encode"})
#: The stages with workers, and the number of concurrent jobs of each: constraints and media mostly wait for child
#: processes.
WORKERS = {"constrain": WAITING, "load": LOADS, "tokenize": 1, "encode": 1, "prefill": 1, "decode": 1}


@dataclass(eq=False)
class RequestGroup:
    """State shared by all samples of a request: its client, its arrival time, and whether it failed, which ends all
    samples."""

    id: RequestId
    sink: Sink
    arrived: float
    failed: bool = False  # the client has its error; workers may still hold samples
    members: list[RequestState] = field(default_factory=list, repr=False)  # samples that have not ended
    cancellation: Cancellation = field(default_factory=Cancellation)  # checked by workers


@dataclass(eq=False)
class RequestState:
    """A request or, once it is encoded, one of its samples."""

    request: Request
    group: RequestGroup
    sample: int = 0
    stage: Stage = Stage.QUEUED
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    keys: tuple[bytes, ...] = ()  # of prompt pages that can be shared; known once encoded
    prompt: PromptText | None = None  # if requested; known once encoded
    pages: PageTable = field(default_factory=PageTable)
    unpruned: bool = False  # the decoder must prune its prompt before pages are allocated
    turn: float = 0.0  # virtual time of its next decode step
    rows: int | None = None  # rows of its next decode step; None = unknown, as before the first one
    workers: int = 0  # number of workers whose current batches contain it
    #: Final rows of a prompt that is prefilled while its clip is loading; None = all.
    final: int | None = None
    fetching: bool = False  # its pages are being fetched from the tier: prefill waits
    reload: bool = False  # the clip differs from its outline: media are loaded again
    prefilled: int | None = None  # positions run, while part of the prompt is left; None = none, or all
    run: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WORKERS, 0.0))  # seconds in each stage
    reached: dict[Milestone, float] = field(default_factory=dict)  # time on the monotonic clock (seconds)
    steps: int = 0  # decode steps in this engine
    _images: int | None = field(default=None, repr=False)  # cached: there may be thousands of parts
    payload: Payload | None = None  # its state for a handover or checkpoint; made on the worker's thread

    @property
    def aborted(self) -> bool:
        """Whether the client has its error: the object exists only because a worker still holds it."""
        return self.group.failed

    @property
    def in_flight(self) -> bool:
        """Whether a worker holds it: its stage's batch has not reported yet."""
        return self.workers > 0

    def awaits(self, page_size: int, prefill_tokens: int) -> bool:
        """Whether rows of its next chunk of prefill, or cached pages of its prompt, are not available yet."""
        begin = len(self.keys) * page_size if self.prefilled is None else self.prefilled
        return self.reload or self.fetching or (self.final is not None and self.final < begin + prefill_tokens)

    @property
    def waits(self) -> bool:
        """Whether it starts only when earlier samples have ended, because it learns from them."""
        constraint = self.request.constraint
        learns = constraint is not None and constraint.sampling is ConstraintSampling.ASAP
        return learns and any(other.sample < self.sample for other in self.group.members)

    @property
    def due(self) -> float:
        """Deadline of its first token, on the monotonic clock (seconds)."""
        return due(self.group.arrived, self.request.deadline, self.request.slo)

    @property
    def samples(self) -> int:
        """Number of samples that it represents."""
        return self.request.sampling.n

    @property
    def work(self) -> int:
        """Its work for the prediction of waits, over all its samples."""
        return self.samples * work_of(self.request.sampling.max_new_tokens)

    @property
    def tokens(self) -> int:
        """Number of positions of prompt and answer; the prompt's are known once encoded."""
        return self.usage.prompt_tokens + self.request.answer_positions

    def pages_wanted(self, page_size: int) -> int:
        """Number of pages for its K/V, including all sequences; 0 while the pruned length of its prompt is unknown."""
        return (
            0
            if self.unpruned or self.request.encodes_only
            else self.request.sequences * pages_for(self.tokens, page_size)
        )

    def too_large(self, config: EngineConfig) -> InvalidArgument | None:
        """The error of a request that needs more pages than the pool has, and would wait forever; None if it fits."""
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
        """The scheduler's view of it; a video counts as its number of frames, as far as that is known.

        ``now``: monotonic clock (seconds). ``causal``: prefill runs the prompt without the masked answer.
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

    def take_over(self, handover: Handover) -> None:
        """Take over the usage, times and keys of ``handover``."""
        self.usage, self.keys, self.unpruned = handover.usage, handover.keys, handover.unpruned
        self.prompt = handover.prompt
        self.run.update(handover.run)
        self.reached.update({name: self.group.arrived + after for name, after in handover.reached.items()})

    def split(self) -> list[RequestState]:
        """A state for each sample, at the stage of this one, which is then obsolete."""
        self.group.members = [
            RequestState(
                one, self.group, i, self.stage, self.usage, self.keys, self.prompt, turn=self.turn, run=dict(self.run)
            )
            for i, one in enumerate(samples(self.request))
        ]
        return self.group.members

    def enter(self, stage: Stage) -> None:
        """Set the stage."""
        self.stage = stage
        if self.request.trace:
            self.group.sink(StageEntered(stage, time.time_ns(), self.sample))

    def reach(self, milestone: Milestone) -> None:
        """Record a milestone, the first time."""
        if milestone in self.reached:
            return
        self.reached[milestone] = time.monotonic()
        if self.request.trace:
            self.group.sink(Reached(milestone, time.time_ns(), self.sample))

    def stepped(self, outcome: Stepped) -> None:
        """Record the result of a decode step."""
        if "text" not in self.reached:
            self.reach("draft")
            if outcome.committed:
                self.reach("commit")
            if outcome.delta:
                self.reach("text")
        if outcome.step is not None:
            self.group.sink(StepTaken(outcome.step, time.time_ns(), self.sample))

    def finished(self, reason: str, answer: Answer, now: float) -> Finished:
        """The final event; ``now``: monotonic clock (seconds)."""
        usage = replace(self.usage, completion_tokens=answer.completion_tokens, kv_positions=answer.kv_positions)
        of_usage = ("completion_tokens", "kv_positions")
        own = {name: value for name, value in vars(answer).items() if name not in of_usage}
        return Finished(reason=reason, usage=usage, times=self._times(now), sample=self.sample, **own)

    def _times(self, now: float) -> StageTimes:
        total = now - self.group.arrived
        first = [self.reached.get(each, now) - self.group.arrived for each in ("text", "draft", "commit")]
        encode = self.run["load"] + self.run["tokenize"] + self.run["encode"]
        run = [encode, self.run["prefill"], self.run["decode"]]  # time for the grammar counts as queue time
        seconds = (max(0.0, total - sum(run)), *run, total, *first)  # a long clip is loaded while it is prefilled
        return StageTimes(*(round(1000 * s, 3) for s in seconds))


def _frames(video: VideoPart, usual: int) -> int:
    """Number of sampled frames of a video, as far as that is known before it is opened; else ``usual``."""
    return usual if video.sampling is None else video.sampling.frames or usual


def open_group(request: Request, sink: Sink, arrived: float) -> RequestState:
    """The first state of an incoming request; ``arrived``: monotonic clock (seconds)."""
    group = RequestGroup(request.id, sink, arrived, cancellation=Cancellation(request.deadline))
    state = RequestState(request, group)
    group.members.append(state)
    return state


def pass_size(stage: str, states: Sequence[RequestState], outcomes: Sequence[object]) -> int:
    """The size of a batch in the unit that determines its time: rows of decode, prompt tokens, visual tokens. 0 = not
    comparable with others: media, constraints, or a batch with failures."""
    if any(isinstance(outcome, BaseException) for outcome in outcomes):
        return 0
    if stage == "decode":
        return sum(state.rows or 1 for state in states)
    if stage == "prefill":
        return sum(state.usage.prompt_tokens for state in states)
    if stage == "encode":
        return sum(outcome.usage.visual_tokens_before for outcome in outcomes if isinstance(outcome, EncodedPrompt))
    return 0
