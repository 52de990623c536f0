"""A description of a served model: plain data, the same on the server and in the client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mmserve.core.tuning import Pair, Tuning


@dataclass(frozen=True, kw_only=True)
class AdapterInfo:
    """An adapter (LoRA) that is loaded for a model."""

    name: str
    digest: str  # of its files
    rank: int  # maximum over its layers
    bytes: int  # size of its weights
    block_length: int = 0  # default of requests with it; 0 = the model's


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Capabilities, limits and defaults of one model.

    Limits are tokens (``max_tokens``: prompt and answer of one request) and bytes; ``visual_tokens_per_image`` is 0 if
    it depends on the image. A video is sampled at ``frames_per_video`` frames and may last ``max_video_seconds``.
    Policies and pruners are given by their registered names; ``recompute_policy`` and ``commit_policy`` are the
    defaults, and ``tuning`` has the reason for them. ``kernels``: the implementation of each op, ``triton`` or
    ``pytorch``, and that of ``decode_step``, ``cuda_graphs`` or ``eager``; empty if the network has its own
    attention.
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
    max_videos: int  # per request
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
    kv_reductions: tuple[str, ...] = ()  # only of next-token models
    image_reuses: tuple[str, ...] = ()  # empty without images, and for networks with their own K/V cache
    sessions: bool = False  # whether it supports sessions of streaming video
    tool_format: str = ""  # of tool calls, defined by the chat template; empty if it has no tools
    end_ids: tuple[int, ...] = ()  # ids of end tokens; only on the server
    max_canvas: int = 0  # most new tokens on which it answers well, 0 = any; only on the server
    decisions: str = ""  # how typed questions are answered: ``together``; empty = not supported
    stored: str = ""  # the checkpoint's quantised format, if weights are dequantised to ``dtype``; else empty
    tuning: Tuning | None = None  # None if an older server sends only the two names

    @property
    def policies(self) -> Tuning:
        """``tuning``; if there is none, only the default pair."""
        named = Pair.named(self.recompute_policy, self.commit_policy)
        return self.tuning or Tuning(source="plain", plain=named, default=named)


#: Requirements of policies besides the kind of attention: whether the policy is for diffusion models, and others.
_COMPANION = "it needs a companion: name one in the model's entry under [[models]] of the server"
NEEDS = {
    "learned": (True, "it needs a filter, which `mmserve train-filter --model PATH` trains"),
    "guided": (True, _COMPANION),
    "draft_model": (False, _COMPANION),
    "scheduler": (True, "it needs a scheduler: name one under [schedulers.NAME] of the server"),
}


def decisions_unsupported(model: str) -> str:
    """The error message for a ``model`` that does not answer typed questions."""
    return f"model {model!r} answers no typed questions: open positions hold random tokens, and no slot can be masked"


def policy_unsupported(model: str, kind: str, policy: str, known: Sequence[str] = (), *, diffusion: bool = True) -> str:
    """The error message for a ``model`` that does not support a ``policy`` of this ``kind``; ``known``: supported
    ones."""
    reasons = [f"model {model!r} has no {kind} policy {policy!r}"]
    suited, need = NEEDS.get(policy, (None, ""))
    # With random tokens at open positions no other policy helps: only those models lack low_confidence.
    helps = not known or "low_confidence" in known or policy == "scheduler"
    reasons += [need] if helps and suited is diffusion else []
    reasons += [f"it has {', '.join(known)}"] if known else []
    return "; ".join(reasons)
