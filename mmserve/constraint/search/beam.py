"""The best valid path through part of a canvas: a beam of parser forks, from the first masked position on.

Committed positions are forced; a masked one tries the model's candidates, the old witness's token and the end of text.
What keeps the beam small is that the old witness is a whole path from the start: a way that could not score more than
the best whole path, if all behind it were the model's first choices, is not gone on. What keeps it alive: a token in
front of committed ones counts only if they may follow; forks are ranked by how far the model's own first choices may
follow them, not by score alone; of those that the constraint cannot tell apart one goes on; each may join the old
witness again, at the same position or a few farther on or back; where little room is left, what needs more to come to
an end is not gone on (``lookahead``); and where every fork has died, those that were left and then the deepest are
looked at again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from mmserve.constraint.search.closing import Closing
from mmserve.constraint.search.lattice import Field
from mmserve.constraint.search.lookahead import SPARE, OutOfTime, Room
from mmserve.constraint.search.parser_states import Place, Places


@dataclass(frozen=True)
class Beam:
    """Numbers of the search."""

    width: int = 4
    ahead: int = 5  # first choices that are tried behind a token
    broken: float = 4.0  # nats that it costs when none of them may follow
    decay: float = 0.75  # how much less it costs with each one that may
    clear: float = 4.5  # nats below an option that all first choices may follow, from where on others are not tried
    again: int = 60  # ways that are gone after all where no other path was found
    salvaged: int = 12  # dead forks for which a completion is looked for
    spare: int = SPARE  # tokens more than the old witness takes, up to which it is asked what places need


@dataclass(frozen=True)
class Path:
    """Tokens of the answer from the first masked position on, without end tokens, and what they score."""

    tokens: list[int]
    score: float  # sum of log-probabilities up to the horizon


@dataclass(slots=True)
class _Fork:
    score: float
    place: Place
    last: _Fork | None = field(default=None, repr=False)
    token: int = -1
    on_witness: bool = False  # whether the old witness goes on from here

    def tokens(self) -> list[int]:
        found: list[int] = []
        fork: _Fork | None = self
        while fork is not None:
            if fork.token >= 0:
                found.append(fork.token)
            fork = fork.last
        return found[::-1]


#: A way by one token: rank, score, the fork it goes on from, the token, and where it stands among the options.
_Grown = tuple[float, float, _Fork, int, int]


@dataclass(slots=True)
class _Left:
    """A way that was not gone: from ``fork``, at ``p``, by an option of that position or by those behind it, too."""

    most: float  # that any path by it can score
    p: int
    fork: _Fork
    option: int
    alone: bool = False


def best_path(
    root: Place, places: Places, f: Field, closing: Closing, beam: Beam, in_time: Callable[[], bool]
) -> Path | None:
    """The best path found through ``f`` and on to the end of the text, the old witness if there is no better way.

    None where the old witness is the only path that was found, and it is not known that there is no better one: ways
    that might have been better were begun, and none of them could be brought to its end.

    ``root`` is the place in front of the field's first position, one of ``places``.

    Raises:
        OutOfTime: ``in_time`` said no; asked once a position.
    """
    if f.stayed[0] >= f.most[0]:
        return Path(f.old_content, f.stayed[0])
    straight = _straight(root, places, f, closing)
    if straight is not None:
        return straight
    size = next((p for p in range(f.size) if f.fixed[p] in f.ends), closing.size - f.start)
    tight = places.known and size - len(f.old_content) <= beam.spare
    room = Room(root, size, places, in_time) if tight else None
    return _Search(places, f, closing, beam, room).run(root, in_time)


def _straight(root: Place, places: Places, f: Field, closing: Closing) -> Path | None:
    """The path of the first choices everywhere, if it is one."""
    tokens = f.first[: f.first_end]
    if f.first_end < f.size and not f.ends_first:
        return None
    if places.reach(root, tokens) < len(tokens):
        return None
    fork = places.through(root, tokens) if tokens else root
    if fork is None:
        return None
    if f.first_end < f.size:
        return Path(tokens, f.first_score) if fork.accepting else None
    tail = closing.tail(fork, f.start + f.size)
    return None if tail is None else Path([*tokens, *tail], f.first_score)


@dataclass(slots=True)
class _Search:
    """A search under way: the best whole path so far, and what it has left open."""

    places: Places
    f: Field
    closing: Closing
    beam: Beam
    room: Room | None  # where there is little left
    best: Path = field(init=False)
    others: bool = False  # whether any whole path was found besides the old witness
    along: dict[Place, list[int]] = field(default_factory=dict)  # places of the old witness, and its tokens in front
    left: list[_Left] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.best = Path(self.f.old_content, self.f.stayed[0])

    def run(self, root: Place, in_time: Callable[[], bool]) -> Path | None:
        """As ``best_path``."""
        f, at = self.f, root
        self.along[root] = [0]
        for q, token in enumerate(f.old_content[: f.size], 1):
            place = self.places.after(at, token)
            if place is None:  # the parser's limits
                break
            at = place
            self.along.setdefault(at, []).append(q)
        forks, trail, p = [_Fork(0.0, root, on_witness=True)], list[tuple[int, list[_Fork]]](), 0
        while p < f.size and forks:
            if not in_time():
                raise OutOfTime
            if f.fixed[p] is not None:
                run = f.run[p]
                forks = self._through(forks, p, run)
                p += len(run)
                continue
            trail.append((p, forks))
            forks = self._kept(self._grown(forks, p), p)
            p += 1
        self._close(forks)
        if not self.others and self._open():
            self._look_again()
        if self.best.score == f.stayed[0] and not (self.others and forks):
            self.closing.cut = self.closing.cramped  # from here on the ways are shorter ones
            self._salvage(trail)
        return self.best if self.others or not self._open() else None

    def _open(self) -> bool:
        """Whether a way that was left might be better than the best path."""
        return any(left.most > self.best.score for left in self.left)

    def _found(self, fork: _Fork, tail: Sequence[int], score: float) -> None:
        """Take note of a whole path."""
        self.others = True
        if score > self.best.score:
            self.best = Path([*fork.tokens(), *tail], score)

    def _through(self, forks: list[_Fork], p: int, run: list[int]) -> list[_Fork]:
        """The forks behind a run of committed tokens from ``p`` on that may follow them and does not end them."""
        content, kept = self.f.content(run), dict[Place, _Fork]()
        for fork in forks:  # the best first
            behind = self.places.through(fork.place, content) if content else fork.place
            if behind is None:
                continue
            grown = fork
            for token in content:
                grown = _Fork(fork.score, behind, grown, token, fork.on_witness)
            if len(content) < len(run):
                if behind.accepting and not fork.on_witness:
                    self._found(grown, (), fork.score + self.f.ended[p + len(content)])
            elif behind in kept:
                kept[behind].on_witness |= fork.on_witness
            else:
                kept[behind] = grown
        return list(kept.values())

    def _ended(self, fork: _Fork, p: int) -> None:
        """Take note of the path that ends with ``fork``, in front of position ``p``."""
        if fork.place.accepting and not (fork.on_witness and p == len(self.f.old_content)):
            score = fork.score + self.f.ended[p]
            if score > -math.inf:
                self._found(fork, (), score)

    def _joined(self, fork: _Fork, p: int) -> bool:
        """Take note of the paths that go on from ``fork``, in front of ``p``, as the old witness does; whether it does
        so with the same tokens at the same positions."""
        f = self.f
        for q in self.along.get(fork.place, ()):
            tail = f.old_content[q:]
            if q == p:
                self._found(fork, tail, fork.score + f.stayed[p])
                return True
            if f.start + p + len(tail) <= self.closing.size and f.agrees(p, tail):
                self._found(fork, tail, fork.score + f.score(p, tail))
        if fork.score + f.stayed[p] > self.best.score and fork.place.matcher.ends(f.old_content[p:]):
            self._found(fork, f.old_content[p:], fork.score + f.stayed[p])
        return False

    def _grown(self, forks: list[_Fork], p: int) -> list[_Grown]:
        """What the options of a masked position make of ``forks``."""
        f, beam, places = self.f, self.beam, self.places
        following = f.content(f.run[p + 1]) if p + 1 < f.size else []
        ahead = f.first[p + 1 : min(p + 1 + max(beam.ahead, len(following)), max(f.first_end, p + 1))]
        behind = ahead or following
        reach, least = len(behind), len(following)
        grown: list[_Grown] = []
        ranks: list[float] = []  # a heap of the best so far, as many as forks are kept
        most, options, floor, old = f.most[p + 1], f.options[p], f.floor[p], f.old[p]

        def add(penalty: float, score: float, fork: _Fork, token: int, option: int) -> None:
            rank = score - penalty
            grown.append((rank, score, fork, token, option))
            if len(ranks) < beam.width:
                heapq.heappush(ranks, rank)
            else:
                heapq.heappushpop(ranks, rank)

        for fork in forks:
            self._ended(fork, p)
            begun, bound = len(grown), self.best.score - most - fork.score
            enough = -math.inf  # below this no option is tried any more
            followed = not fork.on_witness or old in f.ends
            left = False
            known = fork.place.next
            for i, (token, log_probability) in enumerate(options):
                if log_probability <= bound:
                    begun = -1  # there may be a way, but none that would be better
                    break
                score = fork.score + log_probability
                if log_probability < enough or (len(ranks) == beam.width and score < ranks[0]):
                    begun = -1  # there may be a way, but not one that would be kept
                    if not left:
                        self.left.append(_Left(score + most, p, fork, i))
                        left = True
                    if followed:
                        break
                    if token != old:
                        continue
                followed = followed or token == old
                if known.get(token, True) is None:
                    continue
                far = places.reach(fork.place, [token, *behind])
                if far > least and not self._ends_in_time(fork.place, token, p):
                    continue
                if far <= reach:
                    if far > least:
                        add(beam.broken * beam.decay ** (far - 1), score, fork, token, i)
                else:
                    add(0.0, score, fork, token, i)
                    enough = max(enough, log_probability - beam.clear)
            if len(grown) == begun and floor > bound:
                for token in self._others(fork.place, p):
                    if places.reach(fork.place, [token, *following]) > least:
                        add(beam.broken, fork.score + floor, fork, token, len(options))
        grown.sort(key=lambda g: -g[0])
        return grown

    def _ends_in_time(self, place: Place, token: int, p: int) -> bool:
        """Whether a way by ``token`` at ``p`` may come to its end within what is left, for all that is known."""
        if self.room is None:
            return True
        behind = self.places.after(place, token)
        return behind is not None and self.room.fits(behind, p + 1)

    def _others(self, place: Place, p: int) -> list[int]:
        """A token or two for a fork that none of the model's candidates may follow."""
        return self.closing.next_tokens(place) if self.room is None else self.room.ways(place, p, 2)

    def _kept(self, grown: list[_Grown], p: int) -> list[_Fork]:
        """The first of the ways ``grown``, one a place: what the constraint cannot tell apart goes on in one way."""
        f, kept = self.f, dict[Place, _Fork]()
        most, old = f.most[p + 1], f.old[p]
        for _rank, score, fork, token, option in grown:
            if score + most <= self.best.score:
                continue
            on_witness = fork.on_witness and token == old
            if len(kept) >= self.beam.width and not on_witness:
                self.left.append(_Left(score + most, p, fork, option, alone=True))
                continue
            place = self.places.after(fork.place, token)
            if place is None:
                continue
            other = kept.get(place)
            if other is None or other.score < score:
                kept[place] = one = _Fork(score, place, fork, token, on_witness)
                one.on_witness = on_witness or self._joined(one, p + 1)
        return sorted(kept.values(), key=lambda fork: -fork.score)

    def _look_again(self) -> None:
        """Go on with what was left, the most promising first, until a path is found or there is nothing better."""
        f, serial = self.f, len(self.left)
        heap = [(-left.most, i, left) for i, left in enumerate(self.left)]
        heapq.heapify(heap)
        stuck: list[_Left] = []  # by tokens that are no options, or to no end that was found
        for _ in range(self.beam.again):
            if self.others or not heap or -heap[0][0] <= self.best.score:
                break
            _most, _serial, left = heapq.heappop(heap)
            p, fork, options = left.p, left.fork, f.options[left.p]
            if left.option >= len(options):
                stuck.append(left)
                continue
            token, log_probability = options[left.option]
            following: list[_Left] = []
            if not left.alone and left.option + 1 < len(options):
                score = fork.score + options[left.option + 1][1]
                following.append(_Left(score + f.most[p + 1], p, fork, left.option + 1))
            place = self.places.after(fork.place, token)
            if place is not None and self.room is not None and not self.room.fits(place, p + 1):
                place = None
            if place is not None and not (fork.on_witness and token == f.old[p]):
                one, p = _Fork(fork.score + log_probability, place, fork, token), p + 1
                if not self._joined(one, p):
                    forks = [one]
                    if p < f.size and f.fixed[p] is not None:
                        forks, p = self._through(forks, p, f.run[p]), p + len(f.run[p])
                    if p == f.size:
                        self._close(forks)
                    else:
                        for grown in forks:
                            self._ended(grown, p)
                            if f.options[p]:
                                following.append(_Left(grown.score + f.options[p][0][1] + f.most[p + 1], p, grown, 0))
            for more in following:
                serial += 1
                heapq.heappush(heap, (-more.most, serial, more))
        self.left = [*stuck, *(left for _most, _serial, left in heap)]

    def _close(self, forks: list[_Fork]) -> None:
        """Bring the best fork at the horizon to its end that can be, if it is better than the best path."""
        for fork in forks:
            if fork.on_witness:
                continue
            if fork.score <= self.best.score:
                break
            tail = self.closing.tail(fork.place, self.f.start + self.f.size)
            if tail is not None:
                self._found(fork, tail, fork.score)
                break
            self.left.append(_Left(fork.score, self.f.size - 1, fork, 1 << 30, alone=True))

    def _salvage(self, trail: list[tuple[int, list[_Fork]]]) -> None:
        """Bring the deepest forks that led nowhere to an end, by the old witness or a short completion."""
        f, tried, deepest = self.f, 0, self.f.size
        room = next((p for p in range(f.size) if f.fixed[p] in f.ends), self.closing.size - f.start)
        for p, forks in reversed(trail):
            for fork in forks:
                if self.room is not None and not self.room.fits(fork.place, p):
                    continue
                if fork.on_witness or p > deepest or fork.score + f.most[p] <= self.best.score:
                    continue
                tried += 1
                tail = self.closing.tail(fork.place, f.start + p, partial(f.agrees, p))
                if tail is not None:
                    self._found(fork, tail, fork.score + f.score(p, tail))
                elif (way := self.closing.shortest(fork.place)) is not None:
                    deepest = min(deepest, room - len(way))  # ways that are longer have no room either
                if tried == self.beam.salvaged:
                    return
