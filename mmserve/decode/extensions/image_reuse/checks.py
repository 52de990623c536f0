"""Validation of image K/V reuse: which positions of a prompt are reusable, and for which models and requests."""

from __future__ import annotations

from mmserve.core.encoded import Encoded
from mmserve.core.request import Request
from mmserve.core.tuning import ACCOMPANIED, DRAFTING
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.kv.reuse import Reuse, reuse_of
from mmserve.models.base import Attention, CanvasModel, Model
from mmserve.models.decoder_config import UNEVEN


def reusable(encoded: Encoded) -> tuple[int, ...]:
    """Number of positions of each image and clip whose K/V can be reused; the prompt's last position is always run."""
    return tuple(min(span.stop, len(encoded.ids) - 1) - span.start for span in encoded.spans)


def reused(policy: Reuse | None, encoded: Encoded) -> int:
    """Number of prompt positions that are not run under ``policy``."""
    sizes = reusable(encoded)
    return 0 if policy is None else sum(sizes) - policy.count(sizes)


def no_reuse(model: Model, *, reads_pages: bool) -> str:
    """The reason why image K/V cannot be reused for ``model``; empty if they can.

    ``reads_pages``: passes read all K/V pages unmodified.
    """
    if model.vision is None:
        return "it takes no images"
    if isinstance(model, CanvasModel):
        return "its network has its own K/V cache"
    if model.spec.attention is Attention.BLOCK_CAUSAL:
        return "its attention is block-causal, and an image may span two blocks"
    if not model.decoder.config.plain_attention:
        return UNEVEN
    return "" if reads_pages else "the server has [engine] sparse_* or kv_bits"


def check_reuse(request: Request, model: Model, *, reads_pages: bool) -> None:
    """Check that ``model`` and the request's other options allow reuse of image K/V.

    Raises:
        Unimplemented: the model or the server lacks a required feature.
        InvalidArgument: options of the request conflict.
    """
    policy = reuse_of(request)
    if policy is None:
        return
    if why := no_reuse(model, reads_pages=reads_pages):
        raise Unimplemented(f"model {model.spec.name!r} has no image_reuse here: {why}")
    if model.spec.causal and request.diffusion.recompute.name != "last":
        raise InvalidArgument.of("diffusion.recompute", "must be 'last' with image_reuse")
    if request.diffusion.commit.name in ACCOMPANIED:
        raise InvalidArgument.of("diffusion.commit", "must not be a policy with a companion model with image_reuse")
    if policy.each_step and request.diffusion.commit.name in DRAFTING:  # a draft is run in fewer passes than its tokens
        why = "must not be a policy that drafts with an image_reuse that runs positions again at each step"
        raise InvalidArgument.of("diffusion.commit", f"{why}; set its each_step to 0")
    if request.kv_reduction is not None:
        raise InvalidArgument.of("kv_reduction", "must not be set with image_reuse")
