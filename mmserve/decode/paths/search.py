"""The best valid path through part of a canvas: a beam of parser forks, from the first masked position on.

Committed positions are forced; a masked one tries the model's candidates, the old witness's token and the end of text.
Three things keep the beam alive where a plain one dies. A token in front of committed ones counts only if they may
follow. Forks are ranked by how far the model's own first choices may follow them, not by score alone. And where every
fork has died, the deepest from which the old witness or a short completion still leads to the end is taken.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
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
    """The best path found through ``f`` and on to the end of the text, the old witness if there is no better way.

    None where the old witness is the only path that was found, and it is not known that there is no better one: ways
    that might have been better were begun, and none of them could be brought to its end.

    ``matcher`` stands in front of the field's first position.

    Raises:
        OutOfTime: ``in_time`` said no; asked once a position.
    """
    if f.stayed[0] >= f.most[0]:
        return Path(f.old_content, f.stayed[0])
    straight = _straight(matcher, f, closing)
    if straight is not None:
        return straight
    return _Search(f, closing, beam).run(matcher, in_time)


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


@dataclass(slots=True)
class _Search:
    """A search under way: the best whole path so far, and what it has left open."""

    f: Field
    closing: Closing
    beam: Beam
    best: Path = field(init=False)
    others: bool = False  # whether any whole path was found besides the old witness
    given_up: float = -math.inf  # the most that any way that was given up might have scored

    def __post_init__(self) -> None:
        self.best = Path(self.f.old_content, self.f.stayed[0])

    def run(self, matcher: Matcher, in_time: Callable[[], bool]) -> Path | None:
        """As ``best_path``."""
        f = self.f
        forks = [_Fork(0.0, matcher, b"", on_witness=True)]
        trail: list[tuple[int, list[_Fork]]] = []
        p = 0
        while p < f.size and forks:
            if not in_time():
                raise OutOfTime
            if f.fixed[p] is not None:
                run = f.run[p]
                forks = [grown for fork in forks if (grown := self._through(fork, p, run)) is not None]
                p += len(run)
                continue
            trail.append((p, forks))
            forks = self._expanded(forks, p)
            p += 1
        self._close(forks)
        if not self.others and self.given_up > self.best.score:
            self.closing.cut = self.closing.cramped  # from here on the ways are shorter ones
            self._salvage(trail)
        return self.best if self.others or self.given_up <= self.best.score else None

    def _found(self, fork: _Fork, tail: Sequence[int], score: float) -> None:
        """Take note of a whole path."""
        self.others = True
        if score > self.best.score:
            self.best = Path([*fork.tokens(), *tail], score)

    def _give_up(self, most: float) -> None:
        """Take note of a way that is not gone any farther."""
        self.given_up = max(self.given_up, most)

    def _through(self, fork: _Fork, p: int, run: list[int]) -> _Fork | None:
        """The fork behind a run of committed tokens from ``p`` on; None if they may not follow it, or it ends there."""
        content = self.f.content(run)
        if fork.matcher.valid(content) < len(content):
            return None
        behind = after(fork.matcher, content)
        if behind is None:
            return None
        text, grown = fork.text + self.f.lexicon.text(content), fork
        for token in content:
            grown = _Fork(fork.score, behind, text, grown, token, fork.on_witness)
        if len(content) == len(run):
            return grown
        if not fork.on_witness and behind.accepting:
            self._found(grown, (), fork.score + self.f.ended[p + len(content)])
        return None

    def _expanded(self, forks: list[_Fork], p: int) -> list[_Fork]:
        """The forks one masked position on: the best of all that the position's options give, and the old witness's."""
        f, beam, closing = self.f, self.beam, self.closing
        following = f.content(f.run[p + 1]) if p + 1 < f.size else []
        ahead = f.first[p + 1 : min(p + 1 + max(beam.ahead, len(following)), max(f.first_end, p + 1))]
        behind = ahead or following
        reach, least = len(behind), len(following)
        grown: list[tuple[float, float, _Fork, int]] = []
        ranks: list[float] = []  # the best so far, as many as forks are kept
        most = f.most[p + 1]

        def add(penalty: float, score: float, fork: _Fork, token: int) -> None:
            grown.append((score - penalty, score, fork, token))
            insort(ranks, score - penalty)
            del ranks[: -beam.width]

        for fork in forks:
            if fork.matcher.accepting and (not fork.on_witness or f.old[p] not in f.ends):
                ended = fork.score + f.ended[p]
                if ended > -math.inf:
                    self._found(fork, (), ended)
            begun = len(grown)
            enough = -math.inf  # below this no option is tried any more
            for token, log_probability in f.options[p]:
                score = fork.score + log_probability
                if score + most <= self.best.score:
                    begun = -1  # there may be a way, but none that would be better
                    continue
                if (log_probability < enough or (len(ranks) == beam.width and score < ranks[0])) and not (
                    fork.on_witness and token == f.old[p]
                ):
                    begun = -1  # there may be a way, but not one that would be kept
                    self._give_up(score + most)
                    continue
                far = fork.matcher.valid([token, *behind])
                if far <= reach:
                    if far > least:
                        add(beam.broken * beam.decay ** (far - 1), score, fork, token)
                else:
                    add(0.0, score, fork, token)
                    enough = max(enough, log_probability - beam.clear)
            if len(grown) == begun and fork.score + f.floor[p] + most > self.best.score:
                for token in closing.next_tokens(fork.matcher):
                    if fork.matcher.valid([token, *following]) > least:
                        add(beam.broken, fork.score + f.floor[p], fork, token)
        grown.sort(key=lambda g: -g[0])
        return self._kept(grown, p)

    def _kept(self, grown: list[tuple[float, float, _Fork, int]], p: int) -> list[_Fork]:
        """The first of the ways ``grown``, ranked, but for those with the same text."""
        f, kept, seen = self.f, list[_Fork](), set[bytes]()
        for _rank, score, fork, token in grown:
            if score + f.most[p + 1] <= self.best.score:
                continue
            on_witness = fork.on_witness and token == f.old[p]
            if len(kept) >= self.beam.width and not on_witness:
                self._give_up(score + f.most[p + 1])
                continue
            text = fork.text + f.lexicon.spelled[token]
            if text in seen:
                continue
            seen.add(text)
            matcher = after(fork.matcher, [token])
            if matcher is None:
                continue
            one = _Fork(score, matcher, text, fork, token, on_witness)
            kept.append(one)
            joined = score + f.stayed[p + 1]
            if not on_witness and joined > self.best.score and completes(matcher, f.old_content[p + 1 :]):
                self._found(one, f.old_content[p + 1 :], joined)
        return kept

    def _close(self, forks: list[_Fork]) -> None:
        """Bring the best fork at the horizon to its end that can be, if it is better than the best path."""
        for fork in sorted((fork for fork in forks if not fork.on_witness), key=lambda fork: -fork.score):
            if fork.score <= self.best.score:
                break
            tail = self.closing.tail(fork.matcher, self.f.start + self.f.size)
            if tail is not None:
                self._found(fork, tail, fork.score)
                break
            self._give_up(fork.score)

    def _salvage(self, trail: list[tuple[int, list[_Fork]]]) -> None:
        """Bring the deepest forks that led nowhere to an end, by the old witness or a short completion."""
        f, found = self.f, 0
        for p, forks in reversed(trail):
            for fork in forks:
                if fork.on_witness:
                    continue
                tail: tuple[int, ...] | None = tuple(f.old_content[p:])
                if not completes(fork.matcher, f.old_content[p:]):
                    tail = self.closing.tail(fork.matcher, f.start + p, partial(f.agrees, p))
                if tail is not None:
                    found += 1
                    self._found(fork, tail, fork.score + f.score(p, tail))
            if found >= self.beam.salvaged:
                break


def fits(known: np.ndarray, path: list[int], ends: frozenset[int]) -> bool:
    """Whether ``path`` and end tokens behind it agree with ``known`` (int64, -1 where masked)."""
    if len(path) > len(known):
        return False
    head, rest = known[: len(path)], known[len(path) :].tolist()
    return bool(((head < 0) | (head == path)).all()) and all(token < 0 or token in ends for token in rest)
