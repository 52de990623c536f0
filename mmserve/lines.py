"""Input files of commands with one item a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mmserve.errors import ConfigError

Read = TypeVar("Read")


def read_lines(path: Path, flag: str, read: Callable[[str], Read]) -> list[Read]:
    """The results of ``read`` for each line of the file given by the option ``flag``; blank lines are skipped.

    Raises ``ConfigError`` for a file without lines, and with the line number if ``read`` raises.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines(): JSON may contain U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: {path} cannot be read: {error}") from error
    made = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                made.append(read(line))
        except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{flag}: {path}, line {number}: {why}") from error
    if not made:
        raise ConfigError(f"{flag}: {path} has no lines")
    return made


def json_object(line: str, known: Sequence[str]) -> dict[str, Any]:
    """The JSON object in ``line``; raises ``ValueError`` if it is not an object with only ``known`` keys."""
    data = json.loads(line)
    if not isinstance(data, dict):
        raise ValueError(f"it must be a JSON object with the keys {', '.join(known)}")
    return known_keys(data, known)


def known_keys(data: dict[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """``data``; raises ``ValueError`` if it has a key that is not in ``known``."""
    if unknown := set(data) - set(known):
        raise ValueError(f"unknown key {min(unknown)!r}; known are {', '.join(known)}")
    return data


def read_files(data: dict[str, Any], key: str, folder: Path) -> list[bytes]:
    """The contents of the files whose paths, relative to ``folder``, are listed under ``key``."""
    names = data.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key!r} must be a list of paths")
    return [(folder / name).read_bytes() for name in names]
