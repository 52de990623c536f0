"""Length checks of prompts."""

from __future__ import annotations

from mmserve.core.request import Request
from mmserve.errors import DoesNotFit
from mmserve.models.base import EncoderModel
from mmserve.models.decisions import questions_ids


def answer_length(request: Request, model: EncoderModel) -> int:
    """Number of positions after the prompt; for typed questions, which are parallel branches, the maximum over
    questions."""
    if request.decisions:
        special = model.spec.special_tokens
        return max(questions_ids(model.tokenizer, request.decisions, special_tokens=special).lengths)
    return request.answer_positions


def check_length(request: Request, prompt: int, new: int, limit: int, *, pruned: bool = False) -> None:
    """Raise ``DoesNotFit`` if ``prompt`` positions and ``new`` positions of the answer exceed ``limit``.

    ``pruned``: whether ``prompt`` is a length after pruning.
    """
    if prompt + new > limit:
        field = "sampling.max_new_tokens" if prompt < limit else "messages"
        field = "questions" if request.decisions and prompt < limit else field
        before = " (before pruning)" if pruned else ""
        shorter = "shorten the prompt" if request.prompt_only else "shorten the prompt or lower max_new_tokens"
        if request.decisions:
            shorter = "shorten the context or the questions"
        both = f"{before} and {new} new ones exceed" if new else f"{before} exceeds"
        error = DoesNotFit.of(
            field,
            f"a prompt of {prompt} tokens{both} the limit of {limit}; {shorter} (a server raises it by [engine] "
            "max_tokens, and past its model's context by positions and rope_scaling under [[models]])",
        )
        error.room = max(0, limit - prompt)
        raise error
