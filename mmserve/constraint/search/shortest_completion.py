"""The least number of tokens that brings a text to its end.

The exact search tries every token that may follow, level by level, and goes on from one of the states that the
constraint cannot tell apart (``prefix_equivalence``). It gives up when it has tried very many tokens; then the
shortest completion that ``completion`` finds is an upper bound, and one that is known to exist.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass

from mmserve.constraint.compile.begun import Completion
from mmserve.constraint.search.base import Matcher
from mmserve.constraint.search.completion import Walk, Work, after, cheapest, completes, walk
from mmserve.constraint.search.lexicon import Lexicon
from mmserve.constraint.search.local_search import shorten
from mmserve.constraint.search.prefix_equivalence import DistinctTexts, PrefixClasses
from mmserve.constraint.search.string_completion import complete_strings


@dataclass(frozen=True)
class Effort:
    """How much a search may do, counted in places of the parser and in tokens tried there."""

    exact_tokens: int = 2000
    patient_tokens: int = 200_000  # where it is the exact number that decides; a microsecond each
    patient_places: int = 3000
    walked: int = 40_000  # states of the first walk, about 10 microseconds each
    states: int = 4000  # of a search, the same
    alternatives: int = 12
    similar: int = 3


def find_completion(
    matcher: Matcher,
    lexicon: Lexicon,
    effort: Effort | None = None,
    *,
    classes: Callable[[], PrefixClasses] = DistinctTexts,
    room: int = 0,
    within: int | None = None,
    bound: tuple[int, ...] | None = None,
    searched: bool = False,
    begun: Walk | None = None,
) -> Completion | None:
    """The shortest completion found from where ``matcher`` is; None if none was found.

    Args:
        classes: makes classes of texts, from the one after ``matcher`` on; otherwise every text is its own class.
        room: tokens that are few enough: above, an exact answer is worth a far longer search.
        within: tokens above which a completion is of no use; None where all are known to be longer.
        bound: the completion that a search with the same effort found before, if one did.
        searched: whether there was such a search, so that it is not made again where it found none.
        begun: a completion that is known, which such a search makes shorter.
    """
    effort = effort or Effort()
    exact, at_least = _by_tokens(
        matcher, lexicon, DistinctTexts(), effort.exact_tokens, effort.exact_tokens, within=within
    )
    if exact is not None:
        return Completion(exact, True)
    if within is not None and at_least > within:
        return None
    if bound is None and not searched:
        bound = _bound(matcher, lexicon, effort, classes, begun)
    if bound is not None and len(bound) <= max(at_least, room):
        return Completion(bound, len(bound) <= at_least)
    try:
        exact, far = _by_tokens(matcher, lexicon, classes(), effort.patient_tokens, effort.patient_places, bound)
    except ValueError:  # too much for the classes
        far = at_least
    at_least = max(at_least, far)
    if exact is not None:
        return Completion(exact, True)
    return None if bound is None else Completion(bound, len(bound) <= at_least)


def _bound(
    matcher: Matcher, lexicon: Lexicon, effort: Effort, classes: Callable[[], PrefixClasses], begun: Walk | None
) -> tuple[int, ...] | None:
    """A completion that is short, found by bytes; from ``begun`` where that is known."""
    begun = begun or walk(matcher, lexicon, Work(effort.walked))
    if begun is None:
        with suppress(ValueError):  # too much for the classes
            begun = complete_strings(matcher, lexicon, classes(), Work(effort.states))
    found = (
        _searched(matcher, lexicon, effort)
        if begun is None
        else shorten(begun, matcher, lexicon, Work(effort.states), alternatives=effort.alternatives)
    )
    if found is not None and completes(matcher, found):
        return tuple(found)
    # a grammar that speaks of tokens rather than bytes may not take another spelling of the same text
    return None if begun is None else begun.tokens


def quick_completion(matcher: Matcher, lexicon: Lexicon, states: int) -> tuple[int, ...] | None:
    """A completion that is short, not shortest, in ``states`` states at most; None if there was none so near."""
    begun: Walk | None = walk(matcher, lexicon, Work(states))
    if begun is None:
        return None
    cover = lexicon.cover(lexicon.text(begun.tokens))
    return begun.tokens if cover is None or not matcher.ends(cover) else tuple(cover)


def _searched(matcher: Matcher, lexicon: Lexicon, effort: Effort) -> list[int] | None:
    """A completion found by search, first among few bytes at each state, then among all."""
    for choices in (effort.alternatives, 256):
        found = cheapest(matcher, lexicon, Work(effort.states), choices=choices, similar=effort.similar)
        if found is not None:
            return found
    return None


def _by_tokens(
    matcher: Matcher,
    lexicon: Lexicon,
    classes: PrefixClasses,
    most: int,
    states: int,
    bound: tuple[int, ...] | None = None,
    *,
    within: int | None = None,
) -> tuple[tuple[int, ...] | None, int]:
    """A completion of the least length, or None and a length below which there is none.

    ``most`` tokens are tried, at ``states``; none farther on than would be shorter than the completion ``bound``, and
    none longer than ``within`` tokens.
    """
    if matcher.accepting:
        return (), 0
    level: list[tuple[Hashable, Matcher, tuple[int, ...]]] = [(classes.start(), matcher, ())]
    seen = {classes.start()}
    depth = 0
    while level:
        if bound is not None and depth + 1 == len(bound):
            return bound, depth + 1
        if depth == within:
            return None, depth + 1
        reached = list[tuple[Hashable, Matcher, tuple[int, ...], list[int]]]()
        for prefix_class, before, tokens in level:
            at = after(before, tokens[-1:])
            if at is None:  # the parser's limits: what lies after is not known
                return None, depth
            allowed = at.allowed()
            most -= len(allowed)
            if most < 0:
                return None, depth + 1
            reached.append((prefix_class, at, tokens, allowed.tolist()))
        level, depth = [], depth + 1
        for prefix_class, at, tokens, follow in reached:
            if len(seen) > states:
                return None, depth
            for token in follow:
                grown = classes.after(prefix_class, lexicon.spelled[token])
                if grown not in seen:
                    seen.add(grown)
                    level.append((grown, at, (*tokens, token)))
        for _class_after, before, tokens in level:
            if before.ends(tokens[-1:]):  # to go to all of them would take ten times as long
                return (tokens, depth) if completes(before, tokens[-1:]) else (None, depth)
    return None, 0
