"""A description of a served model: plain data, the same on the server and in the client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mmserve.core.tuning import Pair, Tuning


@dataclass(frozen=True, kw_only=True)
class AdapterInfo:
    """An adapter (LoRA) that is loaded beside a model."""

    name: str
    digest: str  # of its files
    rank: int  # the highest of its layers'
    bytes: int  # of its weights


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Capabilities, limits and defaults of one model.

    Limits count tokens (``max_tokens``: prompt and answer of one request) and bytes; ``visual_tokens_per_image`` is
    0 where it depends on the image. A video is sampled at ``frames_per_video`` frames and may last
    ``max_video_seconds``. Policies and pruners go by their registered names; ``recompute_policy`` and ``commit_policy``
    are those of requests that name none, and ``tuning`` has the reason. ``kernels``: what runs each op,
    ``triton`` or ``pytorch``, and how a ``decode_step`` runs, as ``cuda_graphs`` or ``eager``; empty where the network
    has attention of its own.
    """

    name: str
    architecture: str
    images: bool
    videos: bool
    diffusion: bool
    recompute_policies: tuple[str, ...]
    commit_policies: tuple[str, ...]
    pruners: tuple[str, ...]  # of visual tokens; empty without images
    max_tokens: int
    max_images: int
    visual_tokens_per_image: int
    max_image_bytes: int
    max_videos: int  # a request
    frames_per_video: int  # 0 without videos
    max_video_seconds: float
    max_video_bytes: int
    max_new_tokens: int
    block_length: int
    recompute_policy: str
    commit_policy: str
    parameters: int
    dtype: str
    device: str
    kernels: dict[str, str] = field(default_factory=dict)
    kv_reductions: tuple[str, ...] = ()  # none but for next-token models
    image_reuses: tuple[str, ...] = ()  # none without images, and none where a network keeps its K/V to itself
    sessions: bool = False  # whether sessions of streaming video take it
    tool_format: str = ""  # of tool calls, which the chat template defines; empty where it takes no tools
    end_ids: tuple[int, ...] = ()  # of tokens that end an answer; the server's own
    decisions: str = ""  # how typed questions are answered: ``together``, or empty = not at all
    stored: str = ""  # the quantised form of the checkpoint, whose weights are ``dtype`` here; empty where it is plain
    tuning: Tuning | None = None  # None where a server of an earlier version sends only the two names

    @property
    def policies(self) -> Tuning:
        """``tuning``; where there is none, the named default alone."""
        named = Pair.named(self.recompute_policy, self.commit_policy)
        return self.tuning or Tuning(source="plain", plain=named, default=named)


#: What a policy needs of a model besides the kind of its attention: whether it is for diffusion models, and the rest.
_COMPANION = "it needs a companion: name one in the model's entry under [[models]] of the server"
NEEDS = {
    "learned": (True, "it needs a filter, which `mmserve train-filter --model PATH` trains"),
    "guided": (True, _COMPANION),
    "draft_model": (False, _COMPANION),
    "scheduler": (True, "it needs a scheduler: name one under [schedulers.NAME] of the server"),
}


def undecided(model: str) -> str:
    """Why ``model`` answers no typed questions, for its error."""
    return f"model {model!r} answers no typed questions: open positions hold random tokens, and no slot can be masked"


def lacking(model: str, kind: str, policy: str, known: Sequence[str] = (), *, diffusion: bool = True) -> str:
    """Why ``model`` cannot decode by a ``policy`` of this ``kind``, for its error; ``known``: the policies it has."""
    reasons = [f"model {model!r} has no {kind} policy {policy!r}"]
    suited, need = NEEDS.get(policy, (None, ""))
    # Where open positions hold random tokens, nothing else would help: those models alone have no low_confidence.
    helps = not known or "low_confidence" in known or policy == "scheduler"
    reasons += [need] if helps and suited is diffusion else []
    reasons += [f"it has {', '.join(known)}"] if known else []
    return "; ".join(reasons)
