"""The best valid path through part of a canvas: a beam of parser forks, from the first masked position on.

Committed positions are forced; a masked one tries the model's candidates, the old witness's token and the end of text.
Three things keep the beam alive where a plain one dies. A token in front of committed ones counts only if they may
follow. Forks are ranked by how far the model's own first choices may follow them, not by score alone. And where every
fork has died, the deepest from which the old witness or a short completion still leads to the end is taken.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from mmserve.decode.constraint.base import Matcher
from mmserve.decode.paths.closing import Closing
from mmserve.decode.paths.completion import after, completes
from mmserve.decode.paths.field import Field


@dataclass(frozen=True)
class Beam:
    """Numbers of the search."""

    width: int = 6
    ahead: int = 10  # first choices that are tried behind a token
    broken: float = 4.0  # nats that it costs when none of them may follow
    decay: float = 0.75  # how much less it costs with each one that may
    clear: float = 4.5  # nats below an option that all first choices may follow, from where on others are not tried
    salvaged: int = 4  # completions of dead forks that are compared


@dataclass(frozen=True)
class Path:
    """Tokens of the answer from the first masked position on, without end tokens, and what they score."""

    tokens: list[int]
    score: float  # sum of log-probabilities up to the horizon


@dataclass(slots=True)
class _Fork:
    score: float
    matcher: Matcher
    text: bytes  # forks with the same bytes behind them are at the same place of the parser
    last: _Fork | None = field(default=None, repr=False)
    token: int = -1
    ended: bool = False
    on_witness: bool = False

    def tokens(self) -> list[int]:
        found: list[int] = []
        fork: _Fork | None = self
        while fork is not None:
            if fork.token >= 0:
                found.append(fork.token)
            fork = fork.last
        return found[::-1]


class OutOfTime(Exception):
    """The step's time was over before the search was."""


def best_path(matcher: Matcher, f: Field, closing: Closing, beam: Beam, in_time: Callable[[], bool]) -> Path | None:
    """The best path found through ``f`` and on to the end of the text, the old witness if there is no other way.

    None where other ways were begun and none of them could be brought to its end.

    ``matcher`` stands in front of the field's first position.

    Raises:
        OutOfTime: ``in_time`` said no; asked once a position.
    """
    straight = _straight(matcher, f, closing)
    if straight is not None:
        return straight
    forks = [_Fork(0.0, matcher, b"", on_witness=True)]
    trail: list[tuple[int, list[_Fork]]] = []
    p = 0
    while p < f.size and forks:
        if not in_time():
            raise OutOfTime
        if f.fixed[p] is not None:
            run = f.run[p]
            forks = [grown for fork in forks if (grown := _through(fork, run, f)) is not None]
            p += len(run)
            continue
        trail.append((p, forks))
        forks = _expand(forks, p, f, closing, beam)
        p += 1
    old = Path(f.old_content, f.score(0, f.old_content))
    found = _closed(forks, f, closing)
    closing.cut = closing.cramped  # from here on the ways are shorter ones
    found = found or _salvaged(trail, f, closing, beam)
    if found is None:
        alone = all(fork.on_witness for _p, forks in trail for fork in forks)
        return old if alone else None
    return max(found, old, key=lambda path: path.score)


def _straight(matcher: Matcher, f: Field, closing: Closing) -> Path | None:
    """The path of the first choices everywhere, if it is one."""
    tokens = f.first[: f.first_end]
    if (f.first_end < f.size and not f.ends_first) or matcher.valid(tokens) < len(tokens):
        return None
    fork = after(matcher, tokens)
    if fork is None:
        return None
    if f.first_end < f.size:
        return Path(tokens, f.first_score) if fork.accepting else None
    tail = closing.tail(fork, f.start + f.size)
    return None if tail is None else Path([*tokens, *tail], f.first_score)


def _through(fork: _Fork, run: list[int], f: Field) -> _Fork | None:
    """The fork behind a run of committed tokens; None if they may not follow it."""
    content = f.content(run)
    if fork.ended:
        return None if content else fork
    if fork.matcher.valid(content) < len(content):
        return None
    behind = after(fork.matcher, content)
    if behind is None:
        return None
    text = fork.text + f.lexicon.text(content)
    for token in content:
        fork = _Fork(fork.score, behind, text, fork, token, False, fork.on_witness)
    if len(content) == len(run):
        return fork
    return _Fork(fork.score, behind, text, fork, -1, True, fork.on_witness) if behind.accepting else None


def _expand(forks: list[_Fork], p: int, f: Field, closing: Closing, beam: Beam) -> list[_Fork]:
    """The forks one masked position on: the best of all that the position's options give, and the old witness's."""
    following = f.content(f.run[p + 1]) if p + 1 < f.size else []
    ahead = f.first[p + 1 : min(p + 1 + max(beam.ahead, len(following)), max(f.first_end, p + 1))]
    grown: list[tuple[float, float, _Fork, int, bytes]] = []
    behind, reach, least = ahead or following, len(ahead or following), len(following)
    ranks: list[float] = []  # the best so far, as many as forks are kept

    def add(penalty: float, score: float, fork: _Fork, token: int) -> None:
        text = fork.text + f.lexicon.spelled[token] if token >= 0 else fork.text
        grown.append((score - penalty, score, fork, token, text))
        insort(ranks, score - penalty)
        del ranks[: -beam.width]

    for fork in forks:
        if fork.ended:
            add(0.0, fork.score + f.end_score[p], fork, -1)
            continue
        begun = len(grown)
        if fork.matcher.accepting:
            add(0.0, fork.score + f.end_score[p], fork, -1)
        enough = -math.inf  # below this no option is tried any more
        for token, log_probability in f.options[p]:
            score = fork.score + log_probability
            if (log_probability < enough or (len(ranks) == beam.width and score < ranks[0])) and not (
                fork.on_witness and token == f.old[p]
            ):
                begun = -1  # there may be a way, but not one that would be kept
                continue
            far = fork.matcher.valid([token, *behind])
            if far <= reach:
                if far > least:
                    add(beam.broken * beam.decay ** (far - 1), score, fork, token)
            else:
                add(0.0, score, fork, token)
                enough = max(enough, log_probability - beam.clear)
        if len(grown) == begun:
            for token in closing.next_tokens(fork.matcher):
                if fork.matcher.valid([token, *following]) > least:
                    add(beam.broken, fork.score + f.floor[p], fork, token)
    grown.sort(key=lambda g: -g[0])
    kept: list[_Fork] = []
    seen: set[tuple[bytes, bool]] = set()
    for _rank, score, fork, token, text in grown:
        on_witness = fork.on_witness and (token == f.old[p] if token >= 0 else f.old[p] in f.ends)
        if (text, token < 0) in seen or (len(kept) >= beam.width and not on_witness):
            continue
        seen.add((text, token < 0))
        matcher = fork.matcher
        if token >= 0:
            grown_matcher = after(matcher, [token])
            if grown_matcher is None:
                continue
            matcher = grown_matcher
        kept.append(_Fork(score, matcher, text, fork, token, token < 0, on_witness))
    return kept


def _closed(forks: list[_Fork], f: Field, closing: Closing) -> Path | None:
    """The best fork at the horizon that can be brought to its end; None if only the old witness can."""
    for fork in sorted((fork for fork in forks if not fork.on_witness), key=lambda fork: -fork.score):
        tail = () if fork.ended else closing.tail(fork.matcher, f.start + f.size)
        if tail is not None:
            return Path([*fork.tokens(), *tail], fork.score)
    return None


def _salvaged(trail: list[tuple[int, list[_Fork]]], f: Field, closing: Closing, beam: Beam) -> Path | None:
    """The best of the deepest forks that led nowhere, brought to its end by the old witness or a short completion."""
    found: list[Path] = []
    for p, forks in reversed(trail):
        for fork in forks:
            if fork.on_witness or fork.ended:
                continue
            tail: tuple[int, ...] | None = tuple(f.old_content[p:])
            if not completes(fork.matcher, f.old_content[p:]):
                tail = closing.tail(fork.matcher, f.start + p, partial(f.agrees, p))
            if tail is not None:
                found.append(Path([*fork.tokens(), *tail], fork.score + f.score(p, tail)))
        if len(found) >= beam.salvaged:
            break
    return max(found, key=lambda path: path.score, default=None)


def fits(known: np.ndarray, path: list[int], ends: frozenset[int]) -> bool:
    """Whether ``path`` and end tokens behind it agree with ``known`` (int64, -1 where masked)."""
    if len(path) > len(known):
        return False
    head, rest = known[: len(path)], known[len(path) :].tolist()
    return bool(((head < 0) | (head == path)).all()) and all(token < 0 or token in ends for token in rest)
