"""This project's JSON files in a checkpoint's folder, with a ``format`` version: reading and writing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mmserve.errors import ConfigError

Read = TypeVar("Read")


def read_own(path: Path, what: str, read: Callable[[Any], Read], remedy: str, version: int = 1) -> Read:
    """The result of ``read`` for the file's contents; ``what`` describes the file in errors.

    Raises ``ConfigError`` with the ``remedy`` if it cannot be read, is malformed, or has another ``version``.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable as JSON ({error}): {remedy}") from error
    try:
        if data["format"] != version:
            raise ValueError(f"its format is {data['format']!r}, not {version}")
        return read(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} is not {what} of this version: {why}; {remedy}") from error


def write_own(path: Path, data: Mapping[str, Any], version: int = 1) -> None:
    """Write a file for ``read_own``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": version, **data}, indent=1) + "\n", encoding="utf-8")


def finite(name: str, value: Any) -> float:
    """``value`` as a finite number; raises ``ValueError`` with ``name`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    return float(value)
