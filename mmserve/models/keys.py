"""A ``config.json`` whose values are checked as they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmserve.errors import ConfigError


class Keys:
    """A ``config.json`` whose values are checked as they are read; ``path`` is named in every ``ConfigError``."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def integer(self, *names: str, default: int | None = None, zero: bool = False) -> int:
        """The first of ``names`` that is set, a positive integer, or 0 if ``zero``; ``default`` if none is. Raises
        ``ConfigError``."""
        return int(self._number(names, (int,), default, zero))

    def number(self, *names: str, default: float | None = None, zero: bool = False) -> float:
        """The first of ``names`` that is set, a positive number, or 0 if ``zero``; ``default`` if none is. Raises
        ``ConfigError``."""
        return float(self._number(names, (int, float), default, zero))

    def flag(self, name: str) -> bool:
        """A boolean switch; False if it is not set."""
        value = self.values.get(name)
        if value not in (True, False, None):
            raise ConfigError(f"{self.path}: {name} must be true or false, not {value!r}")
        return bool(value)

    def choice(self, name: str, accepted: tuple[str, ...], default: str) -> str:
        """One of the ``accepted`` strings."""
        value = self.values.get(name, default)
        if value not in accepted:
            raise ConfigError(f"{self.path}: {name} = {value!r} is not supported; it can be {_listed(accepted)}")
        return str(value)

    def words(self, name: str) -> list[str] | None:
        """A list of strings; None if it is not set."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise ConfigError(f"{self.path}: {name} must be a list of strings, not {value!r}")
        return list(value)

    def check(self, switches: Mapping[str, tuple[object, ...]]) -> None:
        """Raises ``ConfigError`` for a switch whose value is not implemented."""
        for name, accepted in switches.items():
            if name in self.values and self.values[name] not in accepted:
                raise ConfigError(
                    f"{self.path}: {name} = {self.values[name]!r} is not supported; it can be {_listed(accepted)}"
                )

    def layer(self, name: str, value: object, layers: int) -> int:
        """``value`` of the key ``name``, an index of a tower's hidden states, as a negative index; ``layers``: the
        tower's.

        Raises ``ConfigError`` if it is not a single valid index.
        """
        if isinstance(value, int) and not isinstance(value, bool) and -layers - 1 <= value <= layers:
            return value if value < 0 else value - layers - 1
        more = ""
        if isinstance(value, list | tuple):
            more = (
                f": features of several layers ({len(value)} here) side by side are not implemented, only those of one"
            )
        raise ConfigError(f"{self.path}: {name} = {value!r} is not one of the tower's {layers} layers{more}")

    def _number(self, names: tuple[str, ...], kinds: tuple[type, ...], default: float | None, zero: bool) -> Any:
        name = next((name for name in names if self.values.get(name) is not None), None)
        if name is None:
            if default is None:
                raise ConfigError(f"{self.path} has no {' or '.join(names)}")
            return default
        value: Any = self.values[name]
        if type(value) not in kinds or not 0 <= value < math.inf or (value == 0 and not zero):
            wanted = "a number of at least 0" if zero else "a positive number"
            raise ConfigError(f"{self.path}: {name} must be {wanted}, not {value!r}")
        return value


def _listed(values: tuple[object, ...]) -> str:
    return " or ".join(repr(value) for value in values)
