"""The policies that a request can choose: by name, or as a class with parameters.

The SDK exports these classes, the server's policies inherit their parameters, and messages have the same fields. The
name of a policy is its class name in snake case: ``DkvDecode`` is ``dkv_decode``.
"""

from __future__ import annotations

import re
from typing import Any, get_args

from mmserve.core.policies import commit, image_reuse, kv_reduction, pruner, recompute
from mmserve.core.policies.commit import *  # noqa: F403 - the names that each of these lists
from mmserve.core.policies.image_reuse import *  # noqa: F403
from mmserve.core.policies.kv_reduction import *  # noqa: F403
from mmserve.core.policies.recompute import *  # noqa: F403

#: The kinds of policies, with the types of their options.
KINDS: dict[str, Any] = {
    "recompute": recompute.Recompute,
    "commit": commit.Commit,
    "kv_reduction": kv_reduction.KvReduction,
    "image_reuse": image_reuse.ImageReuse,
    "pruner": pruner.Pruner,
}


def policy_name(policy: Any) -> str:
    """The name of ``policy``: a policy class, or an instance of one."""
    kind = policy if isinstance(policy, type) else type(policy)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _members(kind: Any) -> list[Any]:
    """The members of a union or ``Literal``."""
    return [kind] if isinstance(kind, type | str) else [m for part in get_args(kind) for m in _members(part)]


def policy_names(kind: str) -> tuple[str, ...]:
    """Names of the policies of one of ``KINDS``."""
    return tuple(dict.fromkeys(m if isinstance(m, str) else policy_name(m) for m in _members(KINDS[kind])))


#: Policies with parameters, by name; names are unique over all kinds.
CLASSES: dict[str, type[Any]] = {
    policy_name(m): m for kind in KINDS.values() for m in _members(kind) if isinstance(m, type)
}
