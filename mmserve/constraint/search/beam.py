"""Beam search over parser states: the best valid path through part of a canvas, from the first masked position on.

Committed positions are forced; a masked one tries the model's candidates, the old witness's token and the end of text.
The old witness is a whole path from the start, so a fork is dropped if it could not score higher even with the model's
most probable tokens everywhere after it. Forks are ranked not only by score, but also by how many of these tokens are
allowed after them; before committed tokens, a fork counts only if they are allowed. Of equivalent forks one is kept.
Each may rejoin the old witness, at the same position or a few to either side. If few tokens are left, the lookahead
bound drops forks. If all forks have died, untried options and then the deepest forks are tried again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from mmserve.constraint.search.feasibility import SPARE, Completions, LookaheadBound, SearchTimeout
from mmserve.constraint.search.forks import Extension, Extensions, Fork, Path, Untried
from mmserve.constraint.search.lattice import TokenLattice
from mmserve.constraint.search.parser_states import ParserState, ParserStateCache

Timer = Callable[[], bool]  # returns whether the step has time left


@dataclass(frozen=True)
class Beam:
    """Parameters of the search."""

    width: int = 4
    lookahead_tokens: int = 5  # most probable tokens that are tried after a token
    penalty: float = 4.0  # in nats, if none of them is allowed
    decay: float = 0.75  # factor of the penalty for each one that is
    margin: float = 4.5  # nats below an option with all these tokens allowed, beyond which others are not tried
    retries: int = 60  # options tried again if no other path was found
    salvaged: int = 12  # dead forks for which a completion is searched
    spare: int = SPARE  # tokens left besides the old witness's up to which the lookahead bound is used


def best_path(
    root: ParserState,
    cache: ParserStateCache,
    lattice: TokenLattice,
    completions: Completions,
    beam: Beam,
    in_time: Timer,
) -> Path | None:
    """The best path found through ``lattice`` to the end of the text; the old witness if no path is better.

    None if only the old witness was found although a better path may exist: better forks were begun, but no completion
    was found for any of them.

    ``root`` is the state before the lattice's first position.

    Raises:
        SearchTimeout: ``in_time`` returned false; it is called once for each position.
    """
    if lattice.old_score[0] >= lattice.upper_bound[0]:
        return Path(lattice.old_content, lattice.old_score[0])
    greedy = _greedy_path(root, cache, lattice, completions)
    if greedy is not None:
        return greedy
    size = lattice.room(completions.size)
    tight = cache.known and size - len(lattice.old_content) <= beam.spare
    lookahead = LookaheadBound(root, size, cache, in_time) if tight else None
    old = Path(lattice.old_content, lattice.old_score[0])
    return _Search(cache, lattice, completions, beam, lookahead, old).run(root, in_time)


def _greedy_path(
    root: ParserState, cache: ParserStateCache, lattice: TokenLattice, completions: Completions
) -> Path | None:
    """The path of the most probable token at each position, if it is valid."""
    tokens = lattice.first[: lattice.first_end]
    if lattice.first_end < lattice.size and not lattice.ends_first:
        return None
    if cache.reach(root, tokens) < len(tokens):
        return None
    fork = cache.after_all(root, tokens) if tokens else root
    if fork is None:
        return None
    if lattice.first_end < lattice.size:
        return Path(tokens, lattice.first_score) if fork.accepting else None
    tail = completions.tail(fork, lattice.start + lattice.size)
    return None if tail is None else Path([*tokens, *tail], lattice.first_score)


@dataclass(slots=True)
class _Search:
    """A running search: the best complete path so far, and the options not tried."""

    cache: ParserStateCache
    lattice: TokenLattice
    completions: Completions
    beam: Beam
    lookahead: LookaheadBound | None  # only if few tokens are left
    best: Path
    found_other: bool = False  # whether a complete path besides the old witness was found
    old_states: dict[ParserState, list[int]] = field(default_factory=dict)  # of the old witness, and tokens before
    untried: list[Untried] = field(default_factory=list)

    def run(self, root: ParserState, in_time: Timer) -> Path | None:
        """As ``best_path``."""
        lattice, at = self.lattice, root
        self.old_states[root] = [0]
        for q, token in enumerate(lattice.old_content[: lattice.size], 1):
            state = self.cache.after(at, token)
            if state is None:  # beyond the parser's limits
                break
            at = state
            self.old_states.setdefault(at, []).append(q)
        forks, trail, p = [Fork(0.0, root, on_witness=True)], list[tuple[int, list[Fork]]](), 0
        while p < lattice.size and forks:
            if not in_time():
                raise SearchTimeout
            if lattice.fixed[p] is not None:
                run = lattice.run[p]
                forks = self._after_committed(forks, p, run)
                p += len(run)
                continue
            trail.append((p, forks))
            forks = self._pruned(self._extended(forks, p), p)
            p += 1
        self._complete(forks)
        if not self.found_other and self._may_improve():
            self._retry_untried()
        if self.best.score == lattice.old_score[0] and not (self.found_other and forks):
            self.completions.cut = self.completions.too_long  # later completions are shorter
            self._salvage(trail)
        return self.best if self.found_other or not self._may_improve() else None

    def _may_improve(self) -> bool:
        """Whether an untried option might be better than the best path."""
        return any(option.upper_bound > self.best.score for option in self.untried)

    def _record(self, fork: Fork, tail: Sequence[int], score: float) -> None:
        """Record a complete path."""
        self.found_other = True
        if score > self.best.score:
            self.best = Path([*fork.tokens(), *tail], score)

    def _after_committed(self, forks: list[Fork], p: int, run: list[int]) -> list[Fork]:
        """The forks after a run of committed tokens from ``p`` on, without those that it ends or that do not allow
        it."""
        content, kept = self.lattice.content(run), dict[ParserState, Fork]()
        for fork in forks:  # the best first
            next_state = self.cache.after_all(fork.state, content) if content else fork.state
            if next_state is None:
                continue
            extended = fork
            for token in content:
                extended = Fork(fork.score, next_state, extended, token, fork.on_witness)
            if len(content) < len(run):
                if next_state.accepting and not fork.on_witness:
                    self._record(extended, (), fork.score + self.lattice.end_score[p + len(content)])
            elif next_state in kept:
                kept[next_state].on_witness |= fork.on_witness
            else:
                kept[next_state] = extended
        return list(kept.values())

    def _record_end(self, fork: Fork, p: int) -> None:
        """Record the path that ends with ``fork``, before position ``p``."""
        if fork.state.accepting and not (fork.on_witness and p == len(self.lattice.old_content)):
            score = fork.score + self.lattice.end_score[p]
            if score > -math.inf:
                self._record(fork, (), score)

    def _rejoin(self, fork: Fork, p: int) -> bool:
        """Record the paths that continue from ``fork``, before ``p``, as the old witness does.

        Returns whether the old witness continues with the same tokens at the same positions.
        """
        lattice, old = self.lattice, self.lattice.old_content
        for q in self.old_states.get(fork.state, ()):
            if q == p:
                self._record(fork, old[q:], fork.score + lattice.old_score[p])
                return True
            if lattice.start + p + len(old) - q <= self.completions.size and lattice.agrees(p, old, q):
                tail = old[q:]
                self._record(fork, tail, fork.score + lattice.score(p, tail))
        if fork.score + lattice.old_score[p] > self.best.score and fork.state.matcher.ends(lattice.old_content[p:]):
            self._record(fork, lattice.old_content[p:], fork.score + lattice.old_score[p])
        return False

    def _extended(self, forks: list[Fork], p: int) -> list[Extension]:
        """``forks`` extended by the options of a masked position, best first."""
        lattice, extensions = self.lattice, Extensions(self.beam.width)
        committed = lattice.content(lattice.run[p + 1]) if p + 1 < lattice.size else []
        count = max(self.beam.lookahead_tokens, len(committed))
        expected = lattice.first[p + 1 : min(p + 1 + count, max(lattice.first_end, p + 1))] or committed
        for fork in forks:
            self._record_end(fork, p)
            before, bound = len(extensions.found), self.best.score - lattice.upper_bound[p + 1] - fork.score
            pruned = self._extend_by_options(fork, p, bound, expected, len(committed), extensions)
            if not pruned and len(extensions.found) == before and lattice.floor[p] > bound:
                self._extend_by_others(fork, p, committed, extensions)
        extensions.found.sort(key=lambda extension: -extension[0])
        return extensions.found

    def _extend_by_options(
        self, fork: Fork, p: int, bound: float, expected: list[int], least: int, extensions: Extensions
    ) -> bool:
        """Extend ``fork`` by the options of position ``p`` after which ``least`` of ``expected`` tokens are allowed.

        Returns whether options were left out for their score: paths by them may exist, but none that is better than the
        best path (log-probabilities up to ``bound``) or that would be kept.
        """
        lattice, beam, cache = self.lattice, self.beam, self.cache
        options, old, known = lattice.options[p], lattice.old[p], fork.state.next
        reach, enough = len(expected), -math.inf  # lower bound for options to be tried
        followed = not fork.on_witness or old in lattice.ends
        pruned = recorded = False
        for i, (token, log_probability) in enumerate(options):
            if log_probability <= bound:
                pruned = True
                break
            score = fork.score + log_probability
            if log_probability < enough or score < extensions.lowest:
                pruned = True
                if not recorded:
                    self.untried.append(Untried(score + lattice.upper_bound[p + 1], p, fork, i))
                    recorded = True
                if followed:
                    break
                if token != old:
                    continue
            followed = followed or token == old
            if known.get(token, True) is None:
                continue
            far = cache.reach(fork.state, [token, *expected])
            if far > least and not self._fits_budget(fork.state, token, p):
                continue
            if far <= reach:
                if far > least:
                    extensions.add(beam.penalty * beam.decay ** (far - 1), score, fork, token, i)
            else:
                extensions.add(0.0, score, fork, token, i)
                enough = max(enough, log_probability - beam.margin)
        return pruned

    def _extend_by_others(self, fork: Fork, p: int, committed: list[int], extensions: Extensions) -> None:
        """Extend ``fork`` by tokens that are not options of position ``p``, and after which the ``committed`` ones are
        allowed."""
        lattice, completions, state = self.lattice, self.completions, fork.state
        for token in (
            completions.next_tokens(state) if self.lookahead is None else self.lookahead.fitting_tokens(state, p, 2)
        ):
            if self.cache.reach(state, [token, *committed]) > len(committed):
                score = fork.score + lattice.floor[p]
                extensions.add(self.beam.penalty, score, fork, token, len(lattice.options[p]))

    def _fits_budget(self, state: ParserState, token: int, p: int) -> bool:
        """False only if no path by ``token`` at ``p`` ends within the budget, by the lookahead bound."""
        if self.lookahead is None:
            return True
        next_state = self.cache.after(state, token)
        return next_state is not None and self.lookahead.fits(next_state, p + 1)

    def _pruned(self, extensions: list[Extension], p: int) -> list[Fork]:
        """The best of ``extensions`` for each state: of forks in equivalent states one is kept."""
        lattice, kept = self.lattice, dict[ParserState, Fork]()
        rest, old = lattice.upper_bound[p + 1], lattice.old[p]
        for _rank, score, fork, token, option in extensions:
            if score + rest <= self.best.score:
                continue
            on_witness = fork.on_witness and token == old
            if len(kept) >= self.beam.width and not on_witness:
                self.untried.append(Untried(score + rest, p, fork, option, alone=True))
                continue
            state = self.cache.after(fork.state, token)
            if state is None:
                continue
            other = kept.get(state)
            if other is None or other.score < score:
                kept[state] = extended = Fork(score, state, fork, token, on_witness)
                extended.on_witness = on_witness or self._rejoin(extended, p + 1)
        return sorted(kept.values(), key=lambda fork: -fork.score)

    def _retry_untried(self) -> None:
        """Try the untried options, best upper bound first, until a path is found or none could be better."""
        serial = len(self.untried)
        heap = [(-untried.upper_bound, i, untried) for i, untried in enumerate(self.untried)]
        heapq.heapify(heap)
        stuck: list[Untried] = []  # options whose token is not allowed, or from which no end was found
        for _ in range(self.beam.retries):
            if self.found_other or not heap or -heap[0][0] <= self.best.score:
                break
            _bound, _serial, untried = heapq.heappop(heap)
            if untried.option >= len(self.lattice.options[untried.p]):
                stuck.append(untried)
                continue
            for following in self._retry(untried):
                serial += 1
                heapq.heappush(heap, (-following.upper_bound, serial, following))
        self.untried = [*stuck, *(untried for _bound, _serial, untried in heap)]

    def _retry(self, untried: Untried) -> list[Untried]:
        """Try one option, and record the paths found. Returns the options that can be tried after it."""
        lattice, p, fork = self.lattice, untried.p, untried.fork
        options, following = lattice.options[p], list[Untried]()
        token, log_probability = options[untried.option]
        if not untried.alone and untried.option + 1 < len(options):
            score = fork.score + options[untried.option + 1][1]
            following.append(Untried(score + lattice.upper_bound[p + 1], p, fork, untried.option + 1))
        state = self.cache.after(fork.state, token)
        if state is None or (self.lookahead is not None and not self.lookahead.fits(state, p + 1)):
            return following
        if fork.on_witness and token == lattice.old[p]:
            return following
        extended, p = Fork(fork.score + log_probability, state, fork, token), p + 1
        if self._rejoin(extended, p):
            return following
        forks = [extended]
        if p < lattice.size and lattice.fixed[p] is not None:
            forks, p = self._after_committed(forks, p, lattice.run[p]), p + len(lattice.run[p])
        if p == lattice.size:
            self._complete(forks)
            return following
        for each in forks:
            self._record_end(each, p)
            if lattice.options[p]:
                bound = each.score + lattice.options[p][0][1] + lattice.upper_bound[p + 1]
                following.append(Untried(bound, p, each, 0))
        return following

    def _complete(self, forks: list[Fork]) -> None:
        """Complete the best fork at the horizon that can be completed, if it is better than the best path."""
        for fork in forks:
            if fork.on_witness:
                continue
            if fork.score <= self.best.score:
                break
            tail = self.completions.tail(fork.state, self.lattice.start + self.lattice.size)
            if tail is not None:
                self._record(fork, tail, fork.score)
                break
            self.untried.append(Untried(fork.score, self.lattice.size - 1, fork, 1 << 30, alone=True))

    def _salvage(self, trail: list[tuple[int, list[Fork]]]) -> None:
        """Complete the deepest dead forks, by the old witness or a short completion."""
        lattice, tried, deepest = self.lattice, 0, self.lattice.size
        room = lattice.room(self.completions.size)
        for p, forks in reversed(trail):
            for fork in forks:
                if self.lookahead is not None and not self.lookahead.fits(fork.state, p):
                    continue
                if fork.on_witness or p > deepest or fork.score + lattice.upper_bound[p] <= self.best.score:
                    continue
                tried += 1
                tail = self.completions.tail(fork.state, lattice.start + p, partial(lattice.agrees, p))
                if tail is not None:
                    self._record(fork, tail, fork.score + lattice.score(p, tail))
                elif (way := self.completions.shortest(fork.state)) is not None:
                    deepest = min(deepest, room - len(way))  # longer completions do not fit either
                if tried == self.beam.salvaged:
                    return
