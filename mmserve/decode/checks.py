"""Which requests a decoder can serve: those sampled true to the model, and those to uniform-state diffusion models."""

from __future__ import annotations

from mmserve.core.constraint import ConstraintSampling
from mmserve.core.request import Request, Sampling
from mmserve.decode.commit import Commit
from mmserve.decode.commit.base import Judged, Proposing
from mmserve.decode.commit.scheduled import Scheduled
from mmserve.decode.sampler import GREEDY_BELOW
from mmserve.errors import FieldViolation, InvalidArgument, Unimplemented
from mmserve.models.base import ModelSpec


def check_sampling(request: Request, spec: ModelSpec, commit: Commit) -> None:
    """Refuse a constraint's sampling that has no meaning for this request.

    Only where each token is drawn from the model's distribution given all that is left of it is there a
    probability of a whole answer to be true to.

    Raises:
        InvalidArgument: it is greedy, or its answers may be cut by a stop string.
        Unimplemented: tokens may be committed together, out of order, or be replaced.
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
    otherwise = commit.whole_canvas or commit.revises or commit.closes or isinstance(commit, (Judged, Proposing))
    if not spec.causal and otherwise:
        raise Unimplemented(
            f"constraint.sampling {asked!r} needs tokens that are drawn one by one from the left, and the commit "
            f"policy {request.diffusion.commit.name!r} may do otherwise: use 'low_confidence'"
        )


#: The sampling parameters of a request that have an effect: the rest is the model's own schedule.
_FREE = ("seed", "max_new_tokens", "stop", "n")


def check_uniform_state(request: Request, canvas_length: int, commit: Commit) -> None:
    """``InvalidArgument`` for what the model's own schedule, or the scheduler of ``commit``, leaves no room for."""
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
