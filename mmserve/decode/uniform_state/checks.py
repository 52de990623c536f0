"""Which requests a uniform-state diffusion model can serve."""

from __future__ import annotations

from mmserve.core.request import Request, Sampling
from mmserve.decode.commit import Commit
from mmserve.decode.commit.scheduled import Scheduled
from mmserve.errors import FieldViolation, InvalidArgument

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
