"""A request as the engine knows it: what was asked, and the one table of stages it lives through.

Plain data: neither torch nor gRPC is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from mmserve.core.constraint import ConstraintSpec
from mmserve.core.tenant import ANONYMOUS, Tenant

RequestId = str

#: The largest ``cfg_scale``: LLaDA's evaluations use 0.5 to 2.
LARGEST_CFG_SCALE = 100.0


@dataclass(frozen=True)
class TextPart:
    """Text of a message."""

    text: str


@dataclass(frozen=True)
class ImagePart:
    """An image of a message, as its encoded file (PNG, JPEG, …)."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class VideoSampling:
    """Which frames of a video file the model sees; by default as many as its own settings define, spread evenly.

    fps: frames a second, above 0, at most 30; with scenes the rate at which frames are compared, default 2.
    frames: frames of the whole file, spread evenly, at least 1; not with ``fps`` or scenes.
    scene_similarity: frames whose cosine similarity to the one before is below this begin a scene, in [-1, 1];
        default 0.97.
    scene_frames: frames of a scene at most, 1 to 64, the first in detail and the others compactly; default 4. This or
        ``scene_similarity`` asks for sampling by scenes.
    detail_every: every so many frames one is in detail, the others are one visual token each (slow-fast), at least 1;
        default all in detail.
    """

    fps: float | None = None
    frames: int | None = None
    scene_similarity: float | None = None
    scene_frames: int | None = None
    detail_every: int | None = None

    @property
    def scenes(self) -> bool:
        """Whether frames are chosen by scenes."""
        return self.scene_similarity is not None or self.scene_frames is not None


@dataclass(frozen=True)
class VideoPart:
    """A short video of a message, as its encoded file (MP4, MOV, Matroska, WebM, AVI)."""

    data: bytes = field(repr=False)
    sampling: VideoSampling | None = None


Part = TextPart | ImagePart | VideoPart


@dataclass(frozen=True)
class Message:
    """One chat message: ``role`` is ``system``, ``user`` or ``assistant``."""

    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 keep every token;
    ``repetition_penalty`` 1 changes nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    n: int = 1  # samples of the answer, each with a seed of its own (``core/samples.py``)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A policy by its registered name, with its own numbers and texts, and the policy it builds on where it does.

    A switch is a number too: 0 or 1.
    """

    name: str
    options: Mapping[str, float | str] = field(default_factory=dict)
    base: Policy | None = None


@dataclass(frozen=True, kw_only=True)
class Diffusion:
    """How a canvas is filled. ``steps`` 0 means one token a step; ``block_length`` 0 means the model's default;
    ``cfg_scale`` 0 means no classifier-free guidance."""

    steps: int = 0
    block_length: int = 0
    cfg_scale: float = 0.0
    recompute: Policy = Policy(name="none")
    commit: Policy = Policy(name="low_confidence")


@dataclass(frozen=True)
class Amount:
    """How much a pruner keeps of an image or clip.

    ``keep_ratio``: a share of its patches, in (0, 1]; ``token_budget``: so many of them; ``attention_mass``: as many as
    draw this share of the attention, in (0, 1].
    """

    name: str
    value: float


@dataclass(frozen=True)
class PixelRange:
    """Fewest and most pixels that a picture is resized to; None = the checkpoint's own."""

    least: int | None = None
    most: int | None = None


@dataclass(frozen=True, kw_only=True)
class Vision:
    """How large pictures are for the vision tower, and what becomes of visual tokens before the decoder sees them."""

    pruner: str = "none"
    amount: Amount | None = None
    images: PixelRange = PixelRange()
    videos: PixelRange = PixelRange()  # of a frame, or of all frames where the model bounds them together


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Which events the client wants besides the final one."""

    deltas: bool = True
    snapshots: bool = False
    tokens: bool = False  # the answer's tokens with their log-probabilities, in the last event


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation request; ``deadline`` is on the monotonic clock (seconds), None = none."""

    id: RequestId
    model: str
    messages: tuple[Message, ...]
    sampling: Sampling = Sampling()
    diffusion: Diffusion = Diffusion()
    vision: Vision = Vision()
    streaming: Streaming = Streaming()
    constraint: ConstraintSpec | None = None
    kv_reduction: Policy | None = None  # which K/V are dropped while a next-token model decodes
    image_reuse: Policy | None = None  # which K/V of images are taken from where they stood alone
    deadline: float | None = None
    tenant: Tenant = ANONYMOUS

    @property
    def sequences(self) -> int:
        """Rows of tokens that each pass of a sample runs: guidance has a second one."""
        return 2 if self.diffusion.cfg_scale else 1


class Stage(Enum):
    """Where a request is. A waiting state follows each running one, so that queues are visible and bounded."""

    QUEUED = auto()
    CONSTRAINING = auto()
    CONSTRAINED = auto()  # its constraint can be kept; waits for encode, or for its media to be read
    LOADING = auto()  # its media are being decoded
    LOADED = auto()  # waits for encode
    ENCODING = auto()
    ENCODED = auto()  # waits for prefill
    PREFILLING = auto()
    PREFILLED = auto()  # waits for decode
    STEPPING = auto()  # in the decode step that runs now
    READY = auto()  # decoding, waits for its next step
    FINISHED = auto()
    FAILED = auto()  # also cancelled and expired: the error states which


#: Stages in which a worker holds the request's state: nothing else may touch it until the worker returns.
RUNNING = frozenset({Stage.CONSTRAINING, Stage.LOADING, Stage.ENCODING, Stage.PREFILLING, Stage.STEPPING})
TERMINAL = frozenset({Stage.FINISHED, Stage.FAILED})

#: The life of a request. A running stage ends in the next waiting one, or in failure; prefill may take several turns.
TRANSITIONS: Mapping[Stage, frozenset[Stage]] = {
    Stage.QUEUED: frozenset({Stage.CONSTRAINING, Stage.LOADING, Stage.ENCODING, Stage.FAILED}),
    Stage.CONSTRAINING: frozenset({Stage.CONSTRAINED, Stage.FAILED}),
    Stage.CONSTRAINED: frozenset({Stage.LOADING, Stage.ENCODING, Stage.FAILED}),
    Stage.LOADING: frozenset({Stage.LOADED, Stage.FAILED}),
    Stage.LOADED: frozenset({Stage.ENCODING, Stage.FAILED}),
    Stage.ENCODING: frozenset({Stage.ENCODED, Stage.FAILED}),
    Stage.ENCODED: frozenset({Stage.PREFILLING, Stage.LOADED, Stage.FAILED}),  # LOADED: its clip was not as foreseen
    Stage.PREFILLING: frozenset({Stage.PREFILLED, Stage.ENCODED, Stage.FAILED}),  # ENCODED: a chunk of it is done
    Stage.PREFILLED: frozenset({Stage.STEPPING, Stage.FAILED}),
    Stage.STEPPING: frozenset({Stage.READY, Stage.FINISHED, Stage.FAILED}),
    Stage.READY: frozenset({Stage.STEPPING, Stage.FAILED}),
    Stage.FINISHED: frozenset(),
    Stage.FAILED: frozenset(),
}


def advance(current: Stage, following: Stage) -> Stage:
    """``following``, if the table allows it after ``current``; anything else is a bug and raises ``ValueError``."""
    if following not in TRANSITIONS[current]:
        raise ValueError(f"a request cannot go from {current.name} to {following.name}")
    return following
