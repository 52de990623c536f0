"""The policies of a request: those that it names, and defaults of the model for the others."""

from __future__ import annotations

from collections.abc import Iterator

from mmserve.core.info import ModelInfo
from mmserve.core.request import Diffusion, Policy, Sampling, SeedCanvas
from mmserve.core.tuning import ACCOMPANIED, BALANCED, DRAFTING, UNPENALISED
from mmserve.core.values import SHARE_ABOVE_0
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire.enums import QUALITIES
from mmserve.wire.plain import from_message
from mmserve.wire.policies import chosen_policy

_SAMPLED = (pb.CONSTRAINT_SAMPLING_AWRS, pb.CONSTRAINT_SAMPLING_ASAP)


def wrong_quality(diffusion: pb.DiffusionParams) -> Iterator[tuple[str, str]]:
    """Yields the violations of the requested quality: field, and what it must be."""
    wanted = diffusion.WhichOneof("wanted")
    if wanted is None:
        return
    path = f"diffusion.{wanted}"
    if wanted == "quality" and diffusion.quality not in QUALITIES:
        yield path, "must be QUALITY_EXACT, QUALITY_BALANCED or QUALITY_FAST"
    if wanted == "min_quality" and not SHARE_ABOVE_0.holds(diffusion.min_quality):
        yield path, f"must be {SHARE_ABOVE_0.words}, not {diffusion.min_quality}"
    named = [name for name in ("recompute", "commit") if diffusion.WhichOneof(name)]
    if named:
        yield path, f"must not be set with a policy that is named, as {' and '.join(named)} here: choose one way"
    if diffusion.HasField("steps") and (wanted != "quality" or diffusion.quality != pb.QUALITY_EXACT):
        yield path, "must be exact, or not be set, with steps, which set how many tokens a step commits"


#: Commit policies that never exceed a given number of steps.
_BOUNDED = ("low_confidence", "random", "confident")


def wrong_max_steps(diffusion: pb.DiffusionParams, info: ModelInfo) -> Iterator[tuple[str, str]]:
    """Yields the violations of the maximum steps of a block."""
    if not diffusion.HasField("max_steps"):
        return
    path = "diffusion.max_steps"
    if not info.diffusion:
        yield path, "must not be set: the model decodes one token after another"
    elif diffusion.HasField("steps"):
        yield path, "must not be set with steps"
    elif _bounds(diffusion, info) and diffusion.WhichOneof("wanted") and diffusion.quality != pb.QUALITY_EXACT:
        yield path, "must not be set with a quality other than exact: it decides how many tokens a step commits"
    elif _bounds(diffusion, info) and (diffusion.WhichOneof("commit") or _BOUNDED[0]) not in _BOUNDED:
        yield path, f"must not be set with a commit policy but {', '.join(_BOUNDED)}: others take the steps they need"


def _bounds(diffusion: pb.DiffusionParams, info: ModelInfo) -> bool:
    """Whether the limit affects the number of tokens that a step commits."""
    masked = "low_confidence" in info.commit_policies
    return masked and 0 < diffusion.max_steps < (diffusion.block_length or info.block_length)


def parse_diffusion(message: pb.GenerateRequest, sampling: Sampling, info: ModelInfo) -> Diffusion:
    """The diffusion parameters of the valid ``message``, which has ``sampling``, for the model of ``info``.

    Policies that are not named are the model's for the requested quality or, if these conflict with other options,
    those of plain decoding.
    """
    asked, tuning = message.diffusion, info.policies
    pair = tuning.pair(_quality(asked))
    recompute, commit = pair.recompute, pair.commit
    if not info.diffusion and (message.HasField("kv_reduction") or message.HasField("image_reuse")):
        recompute = tuning.plain.recompute
    if not _leaves_room(message, sampling, commit) or _bounds(asked, info):
        commit = tuning.plain.commit
    return Diffusion(
        steps=asked.steps,
        block_length=asked.block_length or (info.block_length if asked.max_steps else 0),
        max_steps=asked.max_steps,
        seed_canvas=from_message(SeedCanvas, asked.seed_canvas) if asked.HasField("seed_canvas") else None,
        cfg_scale=asked.cfg_scale,
        recompute=chosen_policy(asked, "recompute") or recompute,
        commit=chosen_policy(asked, "commit") or commit,
    )


def _quality(diffusion: pb.DiffusionParams) -> str | float:
    match diffusion.WhichOneof("wanted"):
        case "quality":
            return QUALITIES[diffusion.quality]
        case "min_quality":
            return diffusion.min_quality
    return BALANCED


def _leaves_room(message: pb.GenerateRequest, sampling: Sampling, commit: Policy) -> bool:
    """Whether the other options of ``message`` are compatible with ``commit``; see ``Capabilities.check`` for the
    reasons."""
    names = {commit.name, *([commit.base.name] if commit.base is not None else [])}
    return not (
        message.diffusion.HasField("steps")
        or (sampling.changes_logits and names & UNPENALISED)
        or (message.HasField("kv_reduction") and names & DRAFTING)
        or (message.HasField("image_reuse") and names & (DRAFTING | ACCOMPANIED))
        or message.constraint.sampling in _SAMPLED
    )
