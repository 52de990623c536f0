"""Canvases that begin with tokens from the request: validation and layout."""

from __future__ import annotations

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.request import Request, SeedCanvas
from mmserve.errors import FieldViolation, InvalidArgument
from mmserve.models.base import ModelSpec

_PATH = "diffusion.seed_canvas"


def check_seed(request: Request, spec: ModelSpec, vocab_size: int) -> None:
    """Raises ``InvalidArgument`` for a seed that is no canvas of the model with ``spec``, or conflicts with other
    options."""
    seed = request.diffusion.seed_canvas
    if seed is None:
        return
    wrong = list(_wrong(seed, request, spec, vocab_size))
    if wrong:
        raise InvalidArgument(*(FieldViolation(field, why) for field, why in wrong[:1]))


def _wrong(seed: SeedCanvas, request: Request, spec: ModelSpec, vocab_size: int) -> list[tuple[str, str]]:
    tokens, pinned, new = seed.tokens, set(seed.pinned), request.sampling.max_new_tokens
    found = []
    if spec.causal:
        found.append((_PATH, "must not be set: the model decodes one token after another, on no canvas"))
    if request.constraint is not None:
        found.append((_PATH, "must not be set with a constraint or tools: a template pins text, too"))
    if not tokens:
        found.append((f"{_PATH}.tokens", "must not be empty"))
    elif (highest := max(tokens)) >= vocab_size:
        found.append((f"{_PATH}.tokens", f"must be below {vocab_size}, not {highest}"))
    if pinned and max(pinned) >= len(tokens):
        found.append((f"{_PATH}.pinned", f"must be below {len(tokens)}, the number of tokens, not {max(pinned)}"))
    if spec.renoising is not None and len(tokens) != spec.block_length():
        found.append((f"{_PATH}.tokens", f"must be {spec.block_length()}, the model's canvas, not {len(tokens)}"))
    if len(pinned) >= (new if spec.renoising is None else len(tokens)):
        found.append((f"{_PATH}.pinned", "must leave a position of the answer open"))
    if spec.renoising is not None:
        return found
    if len(tokens) > new:
        found.append((f"{_PATH}.tokens", f"must be at most max_new_tokens, {new}, not {len(tokens)}"))
    for position, token in enumerate(tokens):
        if position in pinned and token == spec.mask_id:
            why = f"must not be the mask token {token} at position {position}, which is pinned: an answer has no masks"
        elif position not in pinned and token != spec.mask_id:
            why = (
                f"must be the mask token {spec.mask_id} at position {position}, which is not pinned: the model masks it"
            )
        else:
            continue
        found.append((f"{_PATH}.tokens", why))
        break
    return found


def write_pinned(canvas: Canvas, seed: SeedCanvas | None) -> None:
    """Write the pinned tokens of ``seed`` to a fresh ``canvas`` of masks, as committed tokens."""
    if seed is None or not seed.pinned:
        return
    pinned = np.unique(np.array(seed.pinned, np.int64))
    canvas.commit(canvas.prompt_length + pinned, np.array(seed.tokens, np.int64)[pinned])
