"""Default policies of a model's requests: from its ``policy.json``, or from the literature."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from typing import Any

from mmserve.core.request import Diffusion, Message, Policy, Request, Sampling
from mmserve.core.tuning import ACCOMPANIED, BALANCED, DRAFTING, FLOORS, Pair, Tuning, fastest
from mmserve.decode.commit import FILTERED
from mmserve.decode.policies import Offered, commit_policy, recompute_policy
from mmserve.errors import ConfigError, InvalidArgument, MMServeError
from mmserve.models.base import Attention, Model, ModelSpec
from mmserve.models.policy_file import PolicyFile

logger = logging.getLogger("mmserve")

POLICY_JSON, LITERATURE, PLAIN = "policy.json", "literature", "plain"
#: Policies whose availability depends on the server's settings, for models of the right kind.
_PROVIDED = ACCOMPANIED | FILTERED | DRAFTING


def tuning_of(model: Model, recompute: tuple[str, ...], commit: tuple[str, ...], offered: Offered) -> Tuning:
    """The defaults of ``model``, which supports these policies on this server; the first are those of plain decoding.

    Raises ``ConfigError`` if its policy file is for another kind of model.
    """
    plain = Pair.named(recompute[0], commit[0])
    if model.policies is not None:
        return _from_file(model.policies, model, plain, {*recompute}, {*commit}, offered)
    pair = literature(model.spec)
    if pair is None or pair.recompute.name not in recompute or pair.commit.name not in commit:
        return Tuning(source=PLAIN, plain=plain, default=plain)
    return Tuning(source=LITERATURE, plain=plain, default=pair)


def literature(spec: ModelSpec) -> Pair | None:
    """The policies that published measurements found safe for this kind of model; None if only plain decoding is known.

    Masked diffusion: Fast-dLLM's caches and confidence threshold (arXiv 2505.22618); the dual cache if a position
    predicts itself; if it predicts the next one (Dream) or prompts do not attend to their answer (LaViDa), the prefix
    cache, which recomputes everything right of the block at each step. Block diffusion: a threshold of 0.95, SGLang's
    default for LLaDA2.0, or 0.9 if a position predicts the next one: Fast-dLLM v2's (arXiv 2509.26328). Uniform-state
    diffusion has its own schedule, and next-token models their K/V cache.
    """
    if spec.renoising is not None or spec.causal:
        return None
    if spec.attention is Attention.BLOCK_CAUSAL:
        least = 0.9 if spec.logit_shift else 0.95
        return Pair(Policy(name="block"), Policy(name="threshold", options={"confidence": least}))
    cache = "dual" if spec.attention is Attention.FULL and spec.logit_shift == 0 else "prefix"
    return Pair(Policy(name=cache), Policy(name="threshold", options={"confidence": 0.9}))


def _from_file(
    file: PolicyFile, model: Model, plain: Pair, recompute: Collection[str], commit: Collection[str], offered: Offered
) -> Tuning:
    for pair in (file.plain, file.default, *(row.pair for row in file.curve)):
        _check(file, pair, model, recompute, commit, offered)

    def usable(pair: Pair) -> bool:
        names = {pair.commit.name, *([pair.commit.base.name] if pair.commit.base is not None else [])}
        return pair.recompute.name in recompute and names <= set(commit)

    if file.plain != plain:
        raise ConfigError(
            f"{file.path} compares with {file.plain}, but plain decoding of {model.spec.name} is {plain}: it was made "
            "for another kind of model; rewrite it with `mmserve tune`, or remove it"
        )
    curve = tuple(row for row in file.curve if usable(row.pair))
    default = file.default
    if not usable(default):
        next_best = fastest(curve, FLOORS[BALANCED])
        default = plain if next_best is None else next_best.pair
        logger.warning("%s: this server cannot decode by %s; the default is %s", file.path, file.default, default)
    return Tuning(source=POLICY_JSON, plain=plain, default=default, curve=curve, measured=file.measured)


def _check(
    file: PolicyFile, pair: Pair, model: Model, recompute: Collection[str], commit: Collection[str], offered: Offered
) -> None:
    """Raise ``ConfigError`` for a pair that models of this kind do not support, or with invalid parameters."""
    what = f"{file.path} names {pair}"
    remedy = "rewrite it with `mmserve tune`, or remove it"
    for policy, known in ((pair.recompute, recompute), (pair.commit, commit)):
        if policy.name not in known and policy.name not in _PROVIDED:
            has = ", ".join(known)
            raise ConfigError(f"{what}, and {model.spec.name} has no policy {policy.name!r}, only {has}; {remedy}")
    asked = Request(
        id="",
        model=model.spec.name,
        messages=(Message("user", ()),),
        sampling=Sampling(),
        diffusion=Diffusion(recompute=pair.recompute, commit=pair.commit),
    )
    try:
        _check_whole(pair.recompute, recompute_policy(asked))
        if pair.commit.name in commit:
            _check_whole(pair.commit, commit_policy(asked, offered))
    except MMServeError as error:
        raise ConfigError(f"{what}: {error.message}; {remedy}") from error


def _check_whole(policy: Policy, made: Any) -> None:
    """Raise ``InvalidArgument`` for a fraction as the value of an integer parameter of ``made``."""
    for field in fields(made) if is_dataclass(made) else ():
        if field.type == "int" and isinstance(policy.options.get(field.name, 0), float):
            raise InvalidArgument.of(f"{policy.name}.{field.name}", "must be a whole number")
