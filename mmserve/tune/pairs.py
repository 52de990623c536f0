"""Pairs of policies that are worth measuring, for each kind of model."""

from __future__ import annotations

from mmserve.core.info import ModelInfo
from mmserve.core.request import Policy
from mmserve.core.tuning import Pair


def _policy(name: str, base: Policy | None = None, **options: float) -> Policy:
    return Policy(name=name, options=options, base=base)


_SCHEDULE = _policy("low_confidence")
_SURE = _policy("threshold", confidence=0.9)
#: What several tokens a step are chosen by, the most careful first.
_PARALLEL = (
    *(_policy("threshold", confidence=confidence) for confidence in (0.95, 0.9, 0.8, 0.7)),
    _policy("factor", factor=1.0),
    _policy("confident", confidence=0.95),
    _policy("entropy_bound", bound=0.1),
    _policy("learned", threshold=0.96),
    _policy("early_commit", base=_SURE),
)
_MASKED = (
    *(Pair(_policy(cache), _SCHEDULE) for cache in ("prefix", "dual", "dkv_decode")),
    *(Pair(_policy(cache), _SURE) for cache in ("none", "prefix", "dkv_decode", "free_cache")),
    *(Pair(_policy("dual"), commit) for commit in _PARALLEL),
)
_BLOCKS = tuple(Pair(_policy("block"), commit) for commit in _PARALLEL)
_RENOISING = tuple(Pair(_policy("block"), _policy("entropy_bound", bound=bound)) for bound in (0.05, 0.2, 0.4))
_CAUSAL = (
    *(Pair(_policy("last"), _policy("ngram", length=length)) for length in (4, 8)),
    *(Pair(_policy("last"), _policy("draft_model", length=length)) for length in (2, 4)),
)


def pairs_for(model: ModelInfo) -> list[Pair]:
    """Plain decoding, and then every pair that ``model`` has all policies of."""
    plain = model.policies.plain
    known = {*model.recompute_policies, *model.commit_policies}
    if not model.diffusion:
        candidates = _CAUSAL
    elif "low_confidence" not in known:
        candidates = _RENOISING
    else:
        candidates = _BLOCKS if plain.recompute.name == "block" else _MASKED
    return [plain, *(pair for pair in candidates if _names(pair) <= known)]


def _names(pair: Pair) -> set[str]:
    base = {pair.commit.base.name} if pair.commit.base is not None else set()
    return {pair.recompute.name, pair.commit.name, *base}
