"""The engine's representation of a request: its options, and the table of its stages.

Plain data: neither torch nor gRPC is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from mmserve.core.constraint import ConstraintSpec
from mmserve.core.decisions import Decision
from mmserve.core.slo import SLO
from mmserve.core.tenant import ANONYMOUS, Tenant
from mmserve.core.tools import ToolCall, ToolUse
from mmserve.core.values import SHARE, SHARE_ABOVE_0, Range, at_least, value, within

RequestId = str


@dataclass(frozen=True)
class TextPart:
    """Text of a message."""

    text: str


@dataclass(frozen=True)
class TokensPart:
    """A prompt as token ids, each in [0, ``vocab_size``): the only part of a ``raw`` request."""

    ids: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class ImagePart:
    """An image of a message, as its encoded file (PNG, JPEG, …)."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class VideoSampling:
    """How frames of a video file are sampled; the default is the model's own sampling.

    ``scene_similarity`` or ``scene_frames`` samples frames by scenes. ``frames`` excludes ``fps`` and scenes.
    """

    fps: float | None = value(
        None,
        within(0, 30, above=True),
        "frames a second; with scenes, the rate at which frames are compared",
        shown="2 with scenes",
    )
    frames: int | None = value(None, at_least(1), "number of frames, spread evenly over the file", shown="the model's")
    scene_similarity: float | None = value(
        None, within(-1, 1), "a frame less similar (cosine) than this to the previous one begins a scene", shown="0.97"
    )
    scene_frames: int | None = value(
        None, within(1, 64), "most frames of a scene: the first in detail, the others as one token each", shown="4"
    )
    detail_every: int | None = value(
        None,
        at_least(1),
        "slow-fast: one in this many frames is in detail, the others are one visual token each",
        shown="all in detail",
    )

    @property
    def scenes(self) -> bool:
        """Whether frames are sampled by scenes."""
        return self.scene_similarity is not None or self.scene_frames is not None


@dataclass(frozen=True)
class VideoPart:
    """A short video of a message, as its encoded file (MP4, MOV, Matroska, WebM, AVI)."""

    data: bytes = field(repr=False)
    sampling: VideoSampling | None = None


MediaPart = ImagePart | VideoPart
Part = TextPart | TokensPart | MediaPart


@dataclass(frozen=True)
class Message:
    """One chat message: ``role`` is ``system``, ``user``, ``assistant`` or ``tool``.

    ``tool_calls``: calls in an assistant's message. ``tool_call_id``: the call that a tool's message answers.
    """

    role: str
    parts: tuple[Part, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


_SEED = Range("from 0 to 2**64 - 1", lambda seed: 0 <= seed < 1 << 64, 0, (1 << 64) - 1)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters. Each of ``n`` samples has its own seed (``core/samples.py``)."""

    temperature: float = value(0.0, at_least(0), "sampling temperature; 0 = the most probable token")
    top_p: float = value(1.0, SHARE_ABOVE_0, "sample among the most probable tokens with this total probability")
    top_k: int = value(0, at_least(0), "sample among this many most probable tokens; 0 = all")
    min_p: float = value(0.0, SHARE, "exclude tokens with less than this share of the highest probability")
    repetition_penalty: float = value(
        1.0, within(0.01, 100), "divides logits of tokens already in the prompt or answer; 1 = none"
    )
    frequency_penalty: float = value(
        0.0, within(-2, 2), "subtracted from a token's logit for each time that the token is in the answer"
    )
    presence_penalty: float = value(0.0, within(-2, 2), "subtracted from the logits of tokens that are in the answer")
    logit_bias: Mapping[int, float] = value(
        meaning="numbers added to the logits of tokens, by token id", shown="none", default_factory=dict
    )
    seed: int = value(0, _SEED, "seed for sampling; the same seed gives the same answer")
    max_new_tokens: int = value(64, at_least(1), "largest number of tokens of the answer", shown="the model's")
    stop: tuple[str, ...] = value(
        (),
        meaning="up to 16 strings of up to 1,024 characters; the answer ends before the first one that occurs",
        shown="none",
    )
    n: int = value(1, at_least(1), "number of samples of the answer")
    ignore_end: bool = value(False, meaning="never choose an end token: the answer has max_new_tokens tokens")

    @property
    def changes_logits(self) -> tuple[str, ...]:
        """The names of fields that change logits before temperature and filters."""
        return (*self._penalties, *(["ignore_end"] if self.ignore_end else ["logit_bias"] * bool(self.logit_bias)))

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens in the prompt or the answer."""
        return bool(self._penalties)

    @property
    def _penalties(self) -> tuple[str, ...]:
        none = {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}
        return tuple(name for name, neutral in none.items() if getattr(self, name) != neutral)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A policy by its registered name, with its parameters, and the policy it builds on, if any.

    Boolean parameters are numbers: 0 or 1.
    """

    name: str
    options: Mapping[str, float | str] = field(default_factory=dict)
    base: Policy | None = None


@dataclass(frozen=True)
class SeedCanvas:
    """The canvas before its first step: ``tokens`` from its first position on; those at ``pinned`` positions are kept
    as part of the answer."""

    tokens: tuple[int, ...] = ()
    pinned: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Diffusion:
    """Diffusion parameters. ``steps`` 0 means one token a step, ``block_length`` 0 the model's default.

    ``max_steps``: maximum steps of a block, 0 = unlimited; requires ``block_length``. At most one of ``steps`` and
    ``max_steps`` is set.
    """

    steps: int = value(0, at_least(1), "denoising steps for the whole answer", shown="one for each token")
    block_length: int = value(0, at_least(1), "tokens of a block", shown="the model's")
    cfg_scale: float = value(
        0.0, within(0, 100), "scale of classifier-free guidance of a masked diffusion model; 0 = none"
    )
    max_steps: int = value(0, at_least(1), "largest number of denoising steps of a block", shown="set by the policy")
    seed_canvas: SeedCanvas | None = None
    recompute: Policy = Policy(name="none")
    commit: Policy = Policy(name="low_confidence")

    def steps_for(self, new_tokens: int) -> int:
        """Denoising steps of an answer of ``new_tokens`` tokens; 0 = one for each token."""
        block = min(self.block_length, new_tokens)
        if not 0 < self.max_steps < block:
            return self.steps
        return max(1, self.max_steps * new_tokens // block)


@dataclass(frozen=True)
class Amount:
    """The amount that a pruner keeps of an image or clip.

    ``keep_ratio``: share of its patches, in (0, 1]; ``token_budget``: number of patches; ``attention_mass``: the
    patches that receive this share of the attention, in (0, 1].
    """

    name: str
    value: float


@dataclass(frozen=True)
class PixelRange:
    """Minimum and maximum number of pixels that an image is resized to; None = the checkpoint's values."""

    least: int | None = None
    most: int | None = None


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Image sizes for the vision tower, and pruning of visual tokens."""

    pruner: str = "none"
    amount: Amount | None = None
    images: PixelRange = PixelRange()
    videos: PixelRange = PixelRange()  # of a frame, or of all frames if the model limits their total


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """The requested events besides the final one."""

    deltas: bool = True
    prefilled: bool = False  # usage of the prompt, before the answer
    prompt: bool = False  # the same, with the prompt's token ids and text
    prompt_tokens: bool = False  # the same, with the prompt's tokens and their log-probabilities
    prompt_alternatives: int = value(
        0, at_least(0, most=20), "number of most probable tokens returned with each of the prompt's tokens"
    )
    snapshots: bool = False
    tokens: bool = False  # the answer's tokens with log-probabilities, in the last event
    drafts: bool = False  # each position of the canvas, after each step
    alternatives: int = value(
        0, at_least(0, most=20), "number of most probable tokens returned with each token and draft"
    )

    @property
    def returns_prompt(self) -> bool:
        """Whether an event with the prompt is sent before the answer."""
        return self.prefilled or self.prompt or self.prompt_tokens

    @property
    def records(self) -> bool:
        """Whether the candidates of all positions are kept, not only of those that become final."""
        return self.drafts or (self.tokens and self.alternatives > 0)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation request; ``deadline``: monotonic clock (seconds), None = none."""

    id: RequestId
    model: str
    messages: tuple[Message, ...]
    sampling: Sampling = Sampling()
    diffusion: Diffusion = Diffusion()
    vision: Vision = Vision()
    streaming: Streaming = Streaming()
    #: Whether the client wants no answer, but, for example, log-probabilities of the prompt. If these need a pass over
    #: the prompt, the one token that follows from it is not part of the events.
    prompt_only: bool = False
    raw: bool = False  # whether the answer continues the text of the only message, without the chat template
    continues: bool = False  # whether the answer continues the last message, which is the assistant's
    template_options: str = ""  # additional variables of the chat template: a JSON object as text; empty = none
    constraint: ConstraintSpec | None = None
    decisions: tuple[Decision, ...] = ()  # typed questions, which follow the prompt; the answer is their canvas
    tools: ToolUse | None = None  # tools in the prompt; ``constraint`` is then the grammar of their calls
    kv_reduction: Policy | None = None  # K/V eviction of a next-token model during decode
    image_reuse: Policy | None = None  # reuse of image K/V that were computed without context
    adapter: str = ""  # the name of a LoRA adapter; within an engine, its key
    deadline: float | None = None
    tenant: Tenant = ANONYMOUS
    slo: SLO | None = None  # latency targets; None = no class
    label: str = ""  # the client's own name for it, for logs
    #: Its trace context, as headers of W3C Trace Context; empty = it is not traced.
    trace: Mapping[str, str] = field(default_factory=dict)

    @property
    def keeps_space(self) -> bool:
        """Whether a space before the first word is part of the answer: if the answer continues a text of the prompt, or
        if a constraint defines every character."""
        return self.raw or self.continues or self.constraint is not None

    @property
    def encodes_only(self) -> bool:
        """Whether the request ends when its prompt is encoded: only the prompt's ids and text are returned, which a
        pruner may determine later."""
        return self.prompt_only and not self.streaming.prompt_tokens and self.vision.pruner == "none"

    @property
    def answer_positions(self) -> int:
        """Positions of the answer that need room after the prompt: none if only log-probabilities of the prompt are
        returned, because these are of next-token models, which do not run the last token."""
        scored = self.prompt_only and self.streaming.prompt_tokens
        return 0 if scored or self.encodes_only else self.sampling.max_new_tokens

    @property
    def sequences(self) -> int:
        """Number of sequences that each pass of a sample runs: two with guidance."""
        return 2 if self.diffusion.cfg_scale else 1


class Stage(Enum):
    """The state of a request. A waiting state follows each running one, so that queues are visible and bounded."""

    QUEUED = auto()
    CONSTRAINING = auto()
    CONSTRAINED = auto()  # its constraint is compiled; waits for encode, or for its media to be loaded
    LOADING = auto()  # its media are being decoded
    LOADED = auto()  # waits for encode
    ENCODING = auto()
    ENCODED = auto()  # waits for prefill
    EXPECTED = auto()  # in prefill on another engine, which sends its K/V ahead
    ARRIVED = auto()  # received after prefill or between decode steps; waits for pages
    PREFILLING = auto()
    PREFILLED = auto()  # waits for decode
    STEPPING = auto()  # in the current decode step
    READY = auto()  # decoding, waits for its next step
    FINISHED = auto()
    FAILED = auto()  # also cancelled and expired; see the error
    LEFT = auto()  # continues in another engine


#: Stages in which a worker owns the request's state: no other thread may access it until the worker returns.
RUNNING = frozenset({Stage.CONSTRAINING, Stage.LOADING, Stage.ENCODING, Stage.PREFILLING, Stage.STEPPING})
TERMINAL = frozenset({Stage.FINISHED, Stage.FAILED, Stage.LEFT})

#: Transitions of a request. A running stage ends in the next waiting one, or in failure; prefill may run several times.
TRANSITIONS: Mapping[Stage, frozenset[Stage]] = {
    Stage.QUEUED: frozenset(
        {
            *(Stage.CONSTRAINING, Stage.LOADING, Stage.ENCODING, Stage.LEFT, Stage.FAILED),
            *(Stage.ENCODED, Stage.EXPECTED, Stage.ARRIVED),  # on another engine
        }
    ),
    Stage.CONSTRAINING: frozenset({Stage.CONSTRAINED, Stage.FAILED}),
    Stage.CONSTRAINED: frozenset({Stage.LOADING, Stage.ENCODING, Stage.FAILED}),
    Stage.LOADING: frozenset({Stage.LOADED, Stage.FAILED}),
    Stage.LOADED: frozenset({Stage.ENCODING, Stage.FAILED}),
    Stage.ENCODING: frozenset({Stage.ENCODED, Stage.FAILED}),
    Stage.ENCODED: frozenset(
        {Stage.PREFILLING, Stage.LOADED, Stage.LEFT, Stage.FINISHED, Stage.FAILED}
    ),  # LOADED: its clip differs from its metadata; FINISHED: only its prompt is returned
    Stage.PREFILLING: frozenset({Stage.PREFILLED, Stage.ENCODED, Stage.FAILED}),  # ENCODED: a chunk is done
    Stage.EXPECTED: frozenset({Stage.ARRIVED, Stage.FAILED}),
    Stage.ARRIVED: frozenset({Stage.PREFILLED, Stage.FAILED}),
    Stage.PREFILLED: frozenset({Stage.STEPPING, Stage.LEFT, Stage.FAILED}),
    Stage.STEPPING: frozenset({Stage.READY, Stage.FINISHED, Stage.FAILED}),
    Stage.READY: frozenset({Stage.STEPPING, Stage.LEFT, Stage.FAILED}),
    Stage.FINISHED: frozenset(),
    Stage.FAILED: frozenset(),
    Stage.LEFT: frozenset(),
}


def advance(current: Stage, following: Stage) -> Stage:
    """``following``, if the table allows it after ``current``; raises ``ValueError`` otherwise, which indicates a
    bug."""
    if following not in TRANSITIONS[current]:
        raise ValueError(f"a request cannot go from {current.name} to {following.name}")
    return following
