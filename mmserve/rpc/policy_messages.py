"""Policies as messages name them: what their numbers must be, and the core policy that a message chooses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.message import Message as ProtoMessage

from mmserve.core.request import Policy
from mmserve.core.tuning import Pair

#: Fields of ``DiffusionParams`` whose policy goes by another name.
_POLICY_NAMES = {"no_cache": "none"}
#: What numbers of policies must be: the rule in words, and the rule.
_AT_LEAST_1 = ("must be at least 1", lambda value: value >= 1)
_ABOVE_0 = ("must be a finite number above 0", lambda value: 0 < value < math.inf)
_NUMBER = ("must be a number", lambda value: not math.isnan(value))
_SHARE = ("must be in [0, 1]", lambda value: 0 <= value <= 1)
_AT_LEAST_2 = ("must be at least 2", lambda value: value >= 2)
#: Bytes of a text that a policy looks for.
MAX_TEXT = 256
_POLICY_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "dkv_decode.refresh": _AT_LEAST_1,
    "dkv_greedy.refresh": _AT_LEAST_1,
    "adaptive.prompt_refresh": _AT_LEAST_1,
    "adaptive.response_refresh": _AT_LEAST_1,
    "adaptive.ratio": _SHARE,
    "threshold.confidence": _ABOVE_0,
    "factor.factor": _ABOVE_0,
    "edit.confidence": _ABOVE_0,
    "learned.threshold": _ABOVE_0,
    "edit.edit_confidence": _ABOVE_0,
    "confident.confidence": ("must be in (0, 1]", lambda value: 0 < value <= 1),
    "entropy_bound.bound": ("must be a finite number of at least 0", lambda value: 0 <= value < math.inf),
    "ngram.length": ("must be in [1, 64]", lambda value: 1 <= value <= 64),
    "ngram.longest": ("must be in [1, 16]", lambda value: 1 <= value <= 16),
    "ngram.shortest": ("must be in [1, 16]", lambda value: 1 <= value <= 16),
    "guided.ratio": _SHARE,
    "draft_model.length": ("must be in [1, 64]", lambda value: 1 <= value <= 64),
    "heavy_hitters.recent": _SHARE,
    "expected_attention.future": ("must be in [1, 65536]", lambda value: 1 <= value <= 1 << 16),
    "visual_cache.outputs": _AT_LEAST_1,
    "blend.recompute": _SHARE,
    "blend.layers": _AT_LEAST_2,
    "kv_share.recompute": _SHARE,
    "kv_share.layers": _AT_LEAST_2,
    "kv_share.each_step": ("must be at most 64", lambda value: value <= 64),
    "lego_link.recompute": _SHARE,
    "random_reuse.recompute": _SHARE,
    "edit.passes": ("must be at most 64", lambda value: value <= 64),
    "early_commit.early": _NUMBER,
    "early_commit.middle": _NUMBER,
    "early_commit.late": _NUMBER,
    "early_commit.mistakes": ("must be a finite number of at least 0", lambda value: 0 <= value < math.inf),
    "early_commit.answer_after": (f"must be at most {MAX_TEXT} bytes", lambda value: len(value.encode()) <= MAX_TEXT),
}


def wrong_policy(message: ProtoMessage, oneof: str, path: str) -> Iterator[tuple[str, str]]:
    """What is wrong with the numbers and texts of the policy chosen in ``oneof``, and of the one it builds on."""
    chosen = message.WhichOneof(oneof)
    if chosen is None:
        return
    policy = getattr(message, chosen)
    for name, value in _options(policy).items():
        rule, holds = _POLICY_RULES.get(f"{chosen}.{name}", ("", lambda _value: True))
        if not holds(value):
            yield f"{path}.{chosen}.{name}", rule if isinstance(value, str) else f"{rule}, not {value}"
    if "base" in policy.DESCRIPTOR.oneofs_by_name:
        yield from wrong_policy(policy, "base", f"{path}.{chosen}")


def chosen_policy(message: ProtoMessage, oneof: str) -> Policy | None:
    """The policy chosen in ``oneof`` with the numbers and texts that were set; None where none is chosen."""
    chosen = message.WhichOneof(oneof)
    if chosen is None:
        return None
    policy = getattr(message, chosen)
    base = chosen_policy(policy, "base") if "base" in policy.DESCRIPTOR.oneofs_by_name else None
    return Policy(name=_POLICY_NAMES.get(chosen, chosen), options=_options(policy), base=base)


def put_pair(message: ProtoMessage, pair: Pair) -> None:
    """Choose the policies of ``pair`` in ``message``, a ``DiffusionParams``."""
    for oneof, policy in (("recompute", pair.recompute), ("commit", pair.commit)):
        _put(message, oneof, policy)


def chosen_pair(message: ProtoMessage) -> Pair | None:
    """What ``put_pair`` put there; None where a policy is missing."""
    recompute, commit = (chosen_policy(message, oneof) for oneof in ("recompute", "commit"))
    return None if recompute is None or commit is None else Pair(recompute, commit)


def _put(message: ProtoMessage, oneof: str, policy: Policy) -> None:
    fields = {_POLICY_NAMES.get(f.name, f.name): f.name for f in message.DESCRIPTOR.oneofs_by_name[oneof].fields}
    chosen = getattr(message, fields[policy.name])
    chosen.SetInParent()
    for name, value in policy.options.items():
        setattr(chosen, name, value)
    if policy.base is not None:
        _put(chosen, "base", policy.base)


def _options(policy: ProtoMessage) -> dict[str, float | str]:
    """The numbers, texts and switches of a policy's message that were set."""
    return {field.name: value for field, value in policy.ListFields() if field.message_type is None}
