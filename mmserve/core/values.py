"""Public values: the default, range and meaning of a field, declared at the field.

Used by the server's checks, the configuration, the command line, the SDK's documentation and the tables of
``docs/``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Range:
    """The accepted values: ``words`` completes "must be …", and ``holds`` tests a value.

    For numbers, ``least`` and ``most`` are the bounds, if any; ``above``: ``least`` is excluded.
    """

    words: str
    holds: Callable[[Any], bool]
    least: float | None = None
    most: float | None = None
    above: bool = False


def _number(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def at_least(least: float, *, meaning: str = "", most: float = math.inf) -> Range:
    """Finite numbers from ``least`` to ``most``; ``meaning``: the special meaning of ``least``, if any."""
    words = f"at least {_number(least)}" + (f" ({_number(least)} = {meaning})" if meaning else "")
    words += f" and at most {_number(most)}" if most < math.inf else ""
    bound = most if most < math.inf else None
    return Range(words, lambda v: least <= v <= most and v < math.inf, least, bound)


def within(least: float, most: float, *, above: bool = False) -> Range:
    """From ``least`` (excluded if ``above``) to ``most``."""
    words = f"{'(' if above else '['}{_number(least)}, {_number(most)}]"
    return Range(f"in {words}", lambda v: (least < v if above else least <= v) and v <= most, least, most, above)


def at_most_bytes(most: int) -> Range:
    """A text of at most ``most`` bytes of UTF-8."""
    return Range(f"at most {most} bytes", lambda v: len(v.encode()) <= most)


def one_of(*known: Any, words: str = "") -> Range:
    """One of ``known``; ``words`` describes them if their list is not clear enough."""
    return Range(words or f"one of {', '.join(map(repr, known))}", lambda v: v in known)


#: A share in [0, 1], and one that excludes 0.
SHARE, SHARE_ABOVE_0 = within(0, 1), within(0, 1, above=True)
ABOVE_0 = Range("above 0 and finite", lambda v: 0 < v < math.inf, 0, above=True)
NUMBER = Range("a number", lambda v: not math.isnan(v))


def value(
    default: Any = MISSING, within: Range | None = None, meaning: str = "", *, shown: str = "", **more: Any
) -> Any:
    """A dataclass field with its range and meaning; ``shown``: description of the default, if its value is not
    clear."""
    return dataclasses.field(default=default, metadata={"range": within, "meaning": meaning, "shown": shown}, **more)


@dataclass(frozen=True)
class Value:
    """A field declared by ``value``; ``kind`` is its type as written, such as ``int`` or ``str | None``."""

    name: str
    kind: str
    default: Any
    range: Range | None
    meaning: str
    shown: str

    @property
    def default_words(self) -> str:
        """The default as shown in documentation; empty for a field without one."""
        return self.shown or ("" if self.default is MISSING else _shown(self.default))

    @property
    def sentence(self) -> str:
        """Meaning, range and default in one line."""
        parts = [self.meaning, self.range.words if self.range else ""]
        default = f"default {self.default_words}" if self.default_words else "required"
        return f"{', '.join(filter(None, parts))}; {default}"


def values(kind: Any) -> Mapping[str, Value]:
    """The fields of the dataclass ``kind`` declared by ``value``, by name."""
    return _values(kind) if isinstance(kind, type) else MappingProxyType({})


@cache
def _values(kind: type) -> Mapping[str, Value]:
    found = {
        f.name: Value(f.name, str(f.type), f.default, *(f.metadata[key] for key in ("range", "meaning", "shown")))
        for f in getattr(kind, "__dataclass_fields__", {}).values()
        if "meaning" in f.metadata
    }
    return MappingProxyType(found)  # shared by all callers


def wrong(kind: Any, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The name of each of the ``given`` values of ``kind`` that is out of range, and what it must be."""
    known = values(kind)
    for name, found in given.items():
        accepted = known[name].range if name in known else None
        if accepted is not None and not accepted.holds(found):
            yield name, f"must be {accepted.words}" + ("" if isinstance(found, str) else f", not {found}")


class Checked:
    """Base of dataclasses that raise ``ValueError`` for a value out of range."""

    def __post_init__(self) -> None:
        for name, rule in wrong(type(self), vars(self)):
            raise ValueError(f"{name} {rule}")


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return repr(default) if isinstance(default, str) else f"{default:g}" if isinstance(default, float) else str(default)
