"""Roles of a chat as messages number them."""

from __future__ import annotations

from mmserve.errors import InvalidArgument
from mmserve.v1 import generation_pb2 as pb

ROLES = {pb.ROLE_SYSTEM: "system", pb.ROLE_USER: "user", pb.ROLE_ASSISTANT: "assistant"}
_ROLE_NUMBERS = {name: number for number, name in ROLES.items()}


def role_number(name: str) -> int:
    """The enum value of a role; raises ``InvalidArgument`` for any but ``system``, ``user`` and ``assistant``."""
    if name not in _ROLE_NUMBERS:
        raise InvalidArgument.of("messages.role", f"must be one of {', '.join(_ROLE_NUMBERS)}, not {name!r}")
    return _ROLE_NUMBERS[name]
