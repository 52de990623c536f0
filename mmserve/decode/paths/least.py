"""The least number of tokens that brings a text to its end.

The exact search tries every token that may follow, level by level, and tells places apart by the bytes behind them (a
parser knows nothing else). It gives up where very many tokens may follow, as within a free string; then the shortest
completion that ``completion`` finds is an upper bound, and one that is known to exist.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.decode.constraint.base import Matcher
from mmserve.decode.paths.completion import Walk, Work, after, cheapest, completes, improve, walk
from mmserve.decode.paths.lexicon import Lexicon


@dataclass(frozen=True)
class Effort:
    """How much a search may do, counted in places of the parser and in tokens tried there."""

    exact_tokens: int = 2000
    exact_choices: int = 64  # tokens that may follow, above which the exact search gives up
    places: int = 4000  # about 10 microseconds each
    alternatives: int = 12
    similar: int = 3


@dataclass(frozen=True)
class Close:
    """A completion: its tokens (no end token), and whether it is known that no shorter one exists."""

    tokens: tuple[int, ...]
    exact: bool


def shortest_close(
    matcher: Matcher, lexicon: Lexicon, effort: Effort | None = None, *, within: int | None = None
) -> Close | None:
    """The shortest completion found from where ``matcher`` is; None if none was found.

    ``within``: tokens above which a completion is of no use; None where all are known to be longer.
    """
    effort = effort or Effort()
    exact, at_least = _by_tokens(matcher, lexicon, effort, within)
    if exact is not None:
        return Close(exact, True)
    if within is not None and at_least > within:
        return None
    begun = walk(matcher, lexicon, Work(effort.places), keep=True)
    found = (
        _searched(matcher, lexicon, effort)
        if begun is None
        else improve(begun, lexicon, Work(effort.places), alternatives=effort.alternatives)
    )
    if found is None or not completes(matcher, found):
        # a grammar that speaks of tokens rather than bytes may not take another spelling of the same text
        if begun is None:
            return None
        found = list(begun.tokens)
    return Close(tuple(found), len(found) <= at_least)


def quick_close(matcher: Matcher, lexicon: Lexicon, places: int) -> tuple[int, ...] | None:
    """A completion that is short, not shortest, in ``places`` places at most; None if there was none so near."""
    begun: Walk | None = walk(matcher, lexicon, Work(places))
    if begun is None:
        return None
    cover = lexicon.cover(lexicon.text(begun.tokens))
    return begun.tokens if cover is None or not completes(matcher, cover) else tuple(cover)


def _searched(matcher: Matcher, lexicon: Lexicon, effort: Effort) -> list[int] | None:
    """A completion found by search, first among few bytes at each place, then among all."""
    for choices in (effort.alternatives, 256):
        found = cheapest(matcher, lexicon, Work(effort.places), choices=choices, similar=effort.similar)
        if found is not None:
            return found
    return None


def _by_tokens(
    matcher: Matcher, lexicon: Lexicon, effort: Effort, within: int | None
) -> tuple[tuple[int, ...] | None, int]:
    """A completion of the least length, or None and a length below which there is none; not looked for any longer than
    ``within``."""
    level: dict[bytes, tuple[Matcher, tuple[int, ...]]] = {b"": (matcher, ())}
    depth = tried = 0
    while level:
        for at, tokens in level.values():
            if at.accepting:
                return tokens, depth
        if depth == within:
            return None, depth + 1
        following: dict[bytes, tuple[Matcher, tuple[int, ...]]] = {}
        for text, (at, tokens) in level.items():
            allowed = at.allowed()
            tried += len(allowed)
            if len(allowed) > effort.exact_choices or tried > effort.exact_tokens:
                return None, depth + 1
            for token in allowed.tolist():
                grown = text + lexicon.spelled[token]
                if grown not in following:
                    fork = after(at, [token])
                    if fork is None:  # the parser's limits: what lies behind is not known
                        return None, depth + 1
                    following[grown] = fork, (*tokens, token)
        level, depth = following, depth + 1
    return None, 0
