"""Enums of messages, by the names of their values in the rest of the code."""

from __future__ import annotations

from typing import Any

from mmserve.errors import InvalidArgument
from mmserve.v1 import generation_pb2 as gen
from mmserve.v1 import video_pb2 as video


def _names(enum: Any) -> dict[int, str]:
    """Names of all values except for ``…_UNSPECIFIED``: ``SCHEMA_OPTION_WHITE_SPACE`` is ``white_space``."""
    prefix = len(enum.DESCRIPTOR.values_by_number[0].name.removesuffix("UNSPECIFIED"))
    return {v.number: v.name[prefix:].lower() for v in enum.DESCRIPTOR.values if v.number}


ROLES = _names(gen.Role)
REASONS = _names(gen.FinishReason)
DRAFT_STATES = _names(gen.DraftState)
QUALITIES = _names(gen.Quality)
CONSTRAINT_MODES = _names(gen.ConstraintMode)
CONSTRAINT_SAMPLINGS = _names(gen.ConstraintSampling)
SCHEMA_OPTIONS = _names(gen.SchemaOption)
TOOL_CHOICES = _names(gen.ToolChoice)
OVERLOADS = _names(video.OverloadPolicy)


def number_of(names: dict[int, str], name: Any, field: str) -> Any:
    """The value with ``name``; raises ``InvalidArgument`` for the ``field`` if there is none."""
    for number, known in names.items():
        if known == name:
            return number
    raise InvalidArgument.of(field, f"must be one of {', '.join(names.values())}, not {name!r}")
