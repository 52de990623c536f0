"""Validation of requests that sample from the constrained distribution, and of requests to uniform-state models."""

from __future__ import annotations

from mmserve.core.constraint import ConstraintSampling
from mmserve.core.request import Request, Sampling
from mmserve.decode.commit import Commit
from mmserve.decode.commit.base import Proposing, Verified
from mmserve.decode.commit.scheduled import Scheduled
from mmserve.decode.sampler import GREEDY_BELOW
from mmserve.errors import FieldViolation, InvalidArgument, Unimplemented
from mmserve.models.base import ModelSpec


def check_sampling(request: Request, spec: ModelSpec, commit: Commit) -> None:
    """Check that the sampling of a constrained request can follow the model's distribution.

    The probability of a complete answer is defined only if each token is drawn from the model's distribution given all
    tokens to its left.

    Raises:
        InvalidArgument: the request is greedy, or a stop string may cut its answers.
        Unimplemented: the commit policy may commit several tokens at once, out of order, or replace tokens.
    """
    if request.constraint is None or request.constraint.sampling is ConstraintSampling.MASK:
        return
    asked = request.constraint.sampling.value
    if request.sampling.temperature < GREEDY_BELOW:
        why = f"must be above 0 with constraint.sampling {asked!r}: a greedy answer is no sample"
        raise InvalidArgument.of("sampling.temperature", why)
    if request.sampling.stop:
        why = f"must be empty with constraint.sampling {asked!r}: its weights are those of whole answers"
        raise InvalidArgument.of("sampling.stop", why)
    if not spec.causal and spec.block_length(request.diffusion.block_length) != 1:
        raise Unimplemented(
            f"constraint.sampling {asked!r} needs tokens that are drawn one by one from the left, each given those "
            "before it: no probability is known of tokens committed together. Use diffusion.block_length 1 with a "
            "model of masked or block diffusion, or an autoregressive model"
        )
    otherwise = commit.whole_canvas or commit.revises or commit.closes or isinstance(commit, (Verified, Proposing))
    if not spec.causal and otherwise:
        raise Unimplemented(
            f"constraint.sampling {asked!r} needs tokens that are drawn one by one from the left, and the commit "
            f"policy {request.diffusion.commit.name!r} may do otherwise: use 'low_confidence'"
        )


#: Sampling parameters that have an effect in a uniform-state model; the rest is set by the model's own schedule.
_FREE = ("seed", "max_new_tokens", "stop", "n")


def check_uniform_state(request: Request, canvas_length: int, commit: Commit) -> None:
    """Raises ``InvalidArgument`` for options that conflict with the model's schedule, or with the scheduler of
    ``commit``."""
    free = {*_FREE, *(commit.scheduler.takes if isinstance(commit, Scheduled) else ())}
    wrong = [
        FieldViolation(f"sampling.{name}", "cannot be set: the model draws by a schedule of its own")
        for name, value in vars(Sampling()).items()
        if name not in free and getattr(request.sampling, name) != value
    ]
    if request.diffusion.block_length not in (0, canvas_length):
        wrong.append(FieldViolation("diffusion.block_length", f"must be {canvas_length}: the model's canvas"))
    if wrong:
        raise InvalidArgument(*wrong)
