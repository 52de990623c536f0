"""vLLM's own fields: ``vllm_xargs``, with those of diffusion models, and the chat template's options."""

from __future__ import annotations

import json

from mmserve.errors import InvalidArgument
from mmserve.http.api import TEMPLATE_OPTIONS, Neutral, take_neutral
from mmserve.http.fields import Fields, copy_fields, typed
from mmserve.v1 import generation_pb2 as pb

XARGS = "vllm_xargs"
#: Fields of ``GenerateRequest`` by their names in ``vllm_xargs``: vLLM's "canvas" is a block here.
_NUMBERS = {
    "diffusion_canvas_length": "diffusion.block_length",
    "diffusion_max_steps": "diffusion.max_steps",
}
_LISTS = {"diffusion_seed_canvas": "tokens", "diffusion_pinned": "pinned"}
_WHY = "is not supported; /v1/decisions answers typed questions in one pass"
_NEUTRAL: Neutral = {
    "diffusion_read_only": ((False,), _WHY),
    "diffusion_constrained": ((False,), _WHY),
    "diffusion_samples": ((1,), "is not supported; use n"),
}


def take_xargs(fields: Fields, found: pb.GenerateRequest) -> dict[str, str]:
    """Read ``vllm_xargs``. Returns the names in errors of fields of ``found``."""
    given = fields.nested(XARGS)
    if given is None:
        return {}
    named = {path: given.path(name) for name, path in _NUMBERS.items() if given.has(name)}
    copy_fields(given, found, _NUMBERS)
    for name, own in _LISTS.items():
        value = given.take(name, list)
        if value is None:
            continue
        named[f"diffusion.seed_canvas.{own}"] = path = given.path(name)
        ids = [typed(each, int, f"{path}[{i}]") for i, each in enumerate(value)]
        _extend(found.diffusion.seed_canvas, own, ids, path)
    if "diffusion.seed_canvas.pinned" in named and "diffusion.seed_canvas.tokens" not in named:
        raise InvalidArgument.of(given.path("diffusion_pinned"), "needs diffusion_seed_canvas, whose tokens it keeps")
    if "diffusion.seed_canvas.tokens" in named:
        named["diffusion.seed_canvas"] = given.path("diffusion_seed_canvas")
    take_neutral(given, _NEUTRAL, ())
    given.end(f"is not a known field of {XARGS}")
    return named


def _extend(seed: pb.SeedCanvas, name: str, ids: list[int], path: str) -> None:
    seed.SetInParent()
    try:
        getattr(seed, name).extend(ids)
    except ValueError:
        raise InvalidArgument.of(path, "must be from 0 to 2**32 - 1") from None


def take_template_options(fields: Fields, found: pb.GenerateRequest) -> None:
    """Read ``chat_template_kwargs``."""
    if options := fields.take(TEMPLATE_OPTIONS, dict, {}):
        found.template_options = json.dumps(options)
