"""Policies in messages: written from a caller's value, and read."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from google.protobuf.message import Message as ProtoMessage

from mmserve.core.policies import CLASSES, policy_name
from mmserve.core.request import Policy
from mmserve.core.tuning import Pair
from mmserve.errors import InvalidArgument
from mmserve.wire.enums import QUALITIES, number_of
from mmserve.wire.plain import put

#: Policies whose field in a message has another name.
_FIELDS = {"none": "no_cache"}
_NAMES = {field: name for name, field in _FIELDS.items()}


def named(policy: Policy) -> Any:
    """``policy`` as an argument of ``generate``: its name, or its class with parameters; raises ``KeyError`` if
    unknown."""
    if not policy.options and policy.base is None:
        return policy.name
    base = {} if policy.base is None else {"base": named(policy.base)}
    return CLASSES[policy.name](**policy.options, **base)


def put_policy(message: Any, oneof: str, policy: Any, path: str) -> None:
    """Set ``policy`` in the message's ``oneof``: a name, or a policy class with parameters."""
    if policy is None:
        return
    name = policy if isinstance(policy, str) else policy_name(policy)
    known = _known(message, oneof)
    if name not in known or not (isinstance(policy, str) or CLASSES.get(name) is type(policy)):
        classes = [kind.__name__ for of, kind in CLASSES.items() if of in known]
        wanted = " or one of ".join(filter(None, [", ".join(map(repr, sorted(known))), ", ".join(classes)]))
        raise InvalidArgument.of(f"{path}{oneof}", f"must be {wanted}, not {policy!r}")
    chosen = getattr(message, known[name])
    chosen.SetInParent()
    numbers = {} if isinstance(policy, str) else {f.name: getattr(policy, f.name) for f in fields(policy)}
    base = numbers.pop("base", None)
    put(chosen, f"{path}{known[name]}.", **numbers)
    if base is not None:
        put_policy(chosen, "base", base, f"{path}{known[name]}.")


def chosen_policy(message: ProtoMessage, oneof: str) -> Policy | None:
    """The policy in ``oneof`` with the parameters that are set; None if none is chosen."""
    chosen = message.WhichOneof(oneof)
    if chosen is None:
        return None
    policy = getattr(message, chosen)
    base = chosen_policy(policy, "base") if "base" in policy.DESCRIPTOR.oneofs_by_name else None
    return Policy(name=_NAMES.get(chosen, chosen), options=options_of(policy), base=base)


def options_of(policy: ProtoMessage) -> dict[str, float | str]:
    """The parameters of a policy's message that are set."""
    return {field.name: value for field, value in policy.ListFields() if field.message_type is None}


def put_pair(message: ProtoMessage, pair: Pair) -> None:
    """Set the policies of ``pair`` in ``message``, a ``DiffusionParams``."""
    _put(message, "recompute", pair.recompute)
    _put(message, "commit", pair.commit)


def chosen_pair(message: ProtoMessage) -> Pair | None:
    """The inverse of ``put_pair``; None if a policy is missing."""
    recompute, commit = (chosen_policy(message, oneof) for oneof in ("recompute", "commit"))
    return None if recompute is None or commit is None else Pair(recompute, commit)


def _put(message: Any, oneof: str, policy: Policy) -> None:
    chosen = getattr(message, _known(message, oneof)[policy.name])
    chosen.SetInParent()
    for name, value in policy.options.items():
        setattr(chosen, name, value)
    if policy.base is not None:
        _put(chosen, "base", policy.base)


def _known(message: Any, oneof: str) -> dict[str, str]:
    """The fields of ``oneof``, by the names of their policies."""
    return {_NAMES.get(field.name, field.name): field.name for field in message.DESCRIPTOR.oneofs_by_name[oneof].fields}


def put_quality(diffusion: Any, quality: str | float | None) -> None:
    """Set ``quality``: a name, or the minimum quality; raises ``InvalidArgument``."""
    if quality is None:
        return
    if isinstance(quality, str) and quality in QUALITIES.values():
        diffusion.quality = number_of(QUALITIES, quality, "diffusion.quality")
    elif isinstance(quality, int | float) and not isinstance(quality, bool):
        diffusion.min_quality = quality
    else:
        names = ", ".join(map(repr, QUALITIES.values()))
        raise InvalidArgument.of("diffusion.quality", f"must be {names} or a number in (0, 1], not {quality!r}")
