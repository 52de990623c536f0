"""Public values: the default, the range and one line of meaning of a field, declared where the field is.

The server's checks, the configuration, the command line, the SDK's documentation and the tables of ``docs/`` read them
from here.
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
    """Which values are accepted: ``words`` completes "must be …", and ``holds`` decides.

    Of numbers ``least`` and ``most`` are the same as data, where there are any; ``above``: ``least`` is left out.
    """

    words: str
    holds: Callable[[Any], bool]
    least: float | None = None
    most: float | None = None
    above: bool = False


def _number(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def at_least(least: float, *, meaning: str = "", most: float = math.inf) -> Range:
    """Finite, from ``least`` to ``most``; ``meaning``: what ``least`` itself means."""
    words = f"at least {_number(least)}" + (f" ({_number(least)} = {meaning})" if meaning else "")
    words += f" and at most {_number(most)}" if most < math.inf else ""
    bound = most if most < math.inf else None
    return Range(words, lambda v: least <= v <= most and v < math.inf, least, bound)


def within(least: float, most: float, *, above: bool = False) -> Range:
    """From ``least``, which ``above`` leaves out, to ``most``."""
    words = f"{'(' if above else '['}{_number(least)}, {_number(most)}]"
    return Range(f"in {words}", lambda v: (least < v if above else least <= v) and v <= most, least, most, above)


def at_most_bytes(most: int) -> Range:
    """A text of at most ``most`` bytes of UTF-8."""
    return Range(f"at most {most} bytes", lambda v: len(v.encode()) <= most)


def one_of(*known: Any, words: str = "") -> Range:
    """One of ``known``; ``words`` where their list is not clear enough."""
    return Range(words or f"one of {', '.join(map(repr, known))}", lambda v: v in known)


#: A share of something, and one that is not nothing.
SHARE, SHARE_ABOVE_0 = within(0, 1), within(0, 1, above=True)
ABOVE_0 = Range("above 0 and finite", lambda v: 0 < v < math.inf, 0, above=True)
NUMBER = Range("a number", lambda v: not math.isnan(v))


def value(
    default: Any = MISSING, within: Range | None = None, meaning: str = "", *, shown: str = "", **more: Any
) -> Any:
    """A dataclass field with its range and meaning; ``shown``: the default in words, where its value is not enough."""
    return dataclasses.field(default=default, metadata={"range": within, "meaning": meaning, "shown": shown}, **more)


@dataclass(frozen=True)
class Value:
    """A field that was declared by ``value``; ``kind`` is its type as written, such as ``int`` or ``str | None``."""

    name: str
    kind: str
    default: Any
    range: Range | None
    meaning: str
    shown: str

    @property
    def default_words(self) -> str:
        """The default as documentation shows it; empty for a field without one."""
        return self.shown or ("" if self.default is MISSING else _shown(self.default))

    @property
    def sentence(self) -> str:
        """Meaning, range and default in one line."""
        parts = [self.meaning, self.range.words if self.range else ""]
        default = f"default {self.default_words}" if self.default_words else "required"
        return f"{', '.join(filter(None, parts))}; {default}"


def values(kind: Any) -> Mapping[str, Value]:
    """The fields of the dataclass ``kind`` that were declared by ``value``, by name."""
    return _values(kind) if isinstance(kind, type) else MappingProxyType({})


@cache
def _values(kind: type) -> Mapping[str, Value]:
    found = {
        f.name: Value(f.name, str(f.type), f.default, *(f.metadata[key] for key in ("range", "meaning", "shown")))
        for f in getattr(kind, "__dataclass_fields__", {}).values()
        if "meaning" in f.metadata
    }
    return MappingProxyType(found)  # shared by all who ask


def wrong(kind: Any, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each of the ``given`` values of ``kind`` that is out of its range: its name, and what it must be."""
    known = values(kind)
    for name, found in given.items():
        accepted = known[name].range if name in known else None
        if accepted is not None and not accepted.holds(found):
            yield name, f"must be {accepted.words}" + ("" if isinstance(found, str) else f", not {found}")


class Checked:
    """Base of dataclasses that refuse a value out of its range with ``ValueError``."""

    def __post_init__(self) -> None:
        for name, rule in wrong(type(self), vars(self)):
            raise ValueError(f"{name} {rule}")


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return repr(default) if isinstance(default, str) else f"{default:g}" if isinstance(default, float) else str(default)
