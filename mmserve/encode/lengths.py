"""How long a prompt may be."""

from __future__ import annotations

from mmserve.core.request import Request
from mmserve.errors import DoesNotFit


def check_length(request: Request, prompt: int, limit: int, *, pruned: bool = False) -> None:
    """``DoesNotFit`` where a ``prompt`` of so many positions, and the answer, are more than ``limit``.

    ``pruned``: whether fewer are left of them.
    """
    new = request.sampling.max_new_tokens
    if prompt + new > limit:
        field = "sampling.max_new_tokens" if prompt < limit else "messages"
        before = " (before pruning)" if pruned else ""
        error = DoesNotFit.of(
            field,
            f"a prompt of {prompt} tokens{before} and {new} new ones exceed the limit of {limit}; "
            "shorten the prompt or lower max_new_tokens (a server raises it by [engine] max_tokens, and past its "
            "model's context by positions and rope_scaling under [[models]])",
        )
        error.room = max(0, limit - prompt)
        raise error
