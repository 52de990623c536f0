"""The witness: a complete answer that obeys the constraint, agrees with all committed tokens, and fits the budget.

Every request has one from admission on, so that it can always be finished; committing any part of it keeps it a
witness. Each step replaces it by the model's most probable valid path, if the search finds one.

For a context-free grammar the search for the first witness begins with a sketch, a sentence of the grammar as words
(``compile.attempts.Sketch``). llguidance's lexer may split a text into other words (always the longest possible one),
so words may need a gap between them; and only the parser decides which documents are valid under a schema. So every
sketch is verified by the parser.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

import numpy as np

from mmserve.constraint.compile.attempts import Sketch
from mmserve.constraint.compile.wire import Completion, FirstAnswers
from mmserve.constraint.search.beam import Beam, best_path
from mmserve.constraint.search.completion import FORK, MASK, Walk, Work, onward
from mmserve.constraint.search.feasibility import SPARE, Completions, SearchTimeout, look_ahead
from mmserve.constraint.search.forks import Path
from mmserve.constraint.search.lattice import TokenLattice, TopK, build_lattice
from mmserve.constraint.search.matcher import Constraint, Grammar, Matcher, completes
from mmserve.constraint.search.parser_states import ParserBudgetExhausted, ParserStateCache
from mmserve.constraint.search.prefix_equivalence import PrefixClasses
from mmserve.constraint.search.shortest_completion import Effort, find_completion
from mmserve.constraint.search.vocabulary import Lexicon

#: Number of completions that a request remembers.
_REMEMBERED = 8


class Infeasible(ValueError):
    """The budget is too small for any answer that was found; ``needed`` tokens are known to be enough (None: none
    known).

    ``exact``: whether fewer are known to be too few. ``too_long``: ``needed`` is a lower bound that exceeds the budget
    so far that no answer was searched.
    """

    def __init__(self, needed: int | None, *, exact: bool = False, too_long: bool = False) -> None:
        super().__init__("no answer was found" if needed is None else f"at least {needed} tokens are needed")
        self.needed, self.exact, self.too_long = needed, exact, too_long


class Outcome(Enum):
    """The outcome of a step's search."""

    FOUND = "found"  # the best path, possibly the old witness
    KEPT = "kept"  # the old witness: better paths were begun, but no completion was found
    LATE = "late"  # the time limit of the step was reached


@dataclass(frozen=True)
class Witness:
    """A request's witness, and the matcher's state in the language."""

    tokens: np.ndarray  # int64 [N], end tokens after the answer
    length: int  # tokens before the first end token
    matcher: Matcher  # after the first ``known`` tokens of the answer, or at its end
    known: int  # number of leading positions before the first masked one
    ends: frozenset[int]
    completions: tuple[tuple[int, ...], ...] = ()  # those that were used
    classes: Callable[[], PrefixClasses] = PrefixClasses  # of the texts of its language
    #: The cached parser states of its language, if requests share them.
    states: ParserStateCache | None = field(default=None, repr=False, compare=False)
    #: None if no other parser can be created.
    language: Constraint | None = field(default=None, repr=False, compare=False)
    cut: bool = False  # a better answer was rejected because its end did not fit the budget

    def with_own_parser(self) -> Witness:
        """The same witness, before any commit, with its own parser."""
        if self.language is None:
            return self
        language = self.language.with_own_parser()
        return replace(self, language=language, matcher=language.start(), classes=language.classes)

    def resized(self, size: int) -> Witness:
        """The same answer, before any commit, on ``size`` positions, which must be enough."""
        tokens = np.full(size, min(self.ends), np.int64)
        tokens[: self.length] = self.tokens[: self.length]
        return replace(self, tokens=tokens)


def admit(constraint: Constraint, lexicon: Lexicon, budget: int, effort: Effort | None = None) -> Witness:
    """The first witness of an answer of ``budget`` positions.

    Raises:
        Infeasible: the shortest answer found is longer.
    """
    shortest = find_completion(constraint.start(), lexicon, effort, classes=constraint.classes, room=budget)
    return start_witness(constraint, budget, shortest)


def fitting(first: FirstAnswers, budget: int) -> Completion | None:
    """The shortest answer found; None if there is none. Raises ``Infeasible`` if no answer fits ``budget`` tokens."""
    if first.too_long(budget):
        raise Infeasible(first.least, too_long=True)
    shortest = first.shortest(budget)
    if shortest is not None and len(shortest.tokens) > budget:
        raise Infeasible(len(shortest.tokens), exact=shortest.exact)
    return shortest


def start_witness(
    constraint: Constraint, budget: int, shortest: Completion | None, states: ParserStateCache | None = None
) -> Witness:
    """The first witness of an answer of ``budget`` positions, from the shortest answer found.

    ``states``: the cached parser states of ``constraint``, if requests share them.

    Raises:
        Infeasible: it is longer, or there is none.
    """
    if shortest is None:
        raise Infeasible(None)
    if len(shortest.tokens) > budget:
        raise Infeasible(len(shortest.tokens), exact=shortest.exact)
    tokens = np.full(budget, min(constraint.vocabulary.end_ids), np.int64)
    tokens[: len(shortest.tokens)] = shortest.tokens
    start, ends = constraint.start(), constraint.vocabulary.end_ids
    if states is not None:
        look_ahead(constraint, shortest.tokens[:1], min(budget, len(shortest.tokens) + SPARE), states)
    return Witness(
        tokens, len(shortest.tokens), start, 0, ends, classes=constraint.classes, states=states, language=constraint
    )


def advance(witness: Witness, known: np.ndarray) -> Witness:
    """The witness after commits.

    Args:
        known: int64 ``[N]``, the answer's committed tokens, -1 where masked.

    Raises:
        ValueError: a committed token is not the witness's.
    """
    committed = known >= 0
    if (known[committed] != witness.tokens[committed]).any():
        raise ValueError("only the witness's tokens can be committed")
    masked = np.flatnonzero(~committed)
    frontier = int(masked[0]) if len(masked) else len(known)
    if frontier == witness.known:
        return witness
    matcher = witness.matcher.fork()
    matcher.consume(witness.tokens[min(witness.known, witness.length) : min(frontier, witness.length)].tolist())
    return replace(witness, matcher=matcher, known=frontier)


def improve(
    witness: Witness,
    known: np.ndarray,
    top: TopK,
    block_end: int,
    lexicon: Lexicon,
    *,
    beam: Beam | None = None,
    states: ParserStateCache | None = None,
    seconds: float = 0.1,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Witness, Outcome]:
    """The most probable witness found, by the model's candidates.

    The search's work is bounded by the beam; ``seconds`` is a last resort, because it makes the result depend on the
    clock.

    Args:
        witness: the result of ``advance`` for ``known``.
        known: int64 ``[N]``, the answer's committed tokens, -1 where masked.
        top: the model's candidates for masked positions.
        block_end: the position after the block, or after the answer if the policy uses the whole canvas.
        states: cached parser states, the witness's own if None; they affect the time of the search, not its result.
    """
    if witness.known >= block_end or witness.known > witness.length:
        return witness, Outcome.FOUND  # nothing is open
    horizon = _horizon(known, witness.ends, block_end)
    lattice = build_lattice(known, witness.known, horizon, top, witness.tokens, witness.length, witness.ends, lexicon)
    deadline = clock() + seconds
    search = partial(_search, witness, lattice, len(known), beam or Beam(), lambda: clock() < deadline)
    language = witness.language
    parser = None if language is None else (lambda: language.with_own_parser().start())
    with (states or witness.states or ParserStateCache(lexicon, witness.classes)).acquire() as cache:
        try:
            found = _within_limits(search, cache) or search(ParserStateCache(lexicon, witness.classes, parser))
        except SearchTimeout:
            return witness, Outcome.LATE
    path, completions = found
    witness = replace(witness, cut=witness.cut or completions.cut)
    # The parser validates the whole path: its work limits are counted anew for each fork.
    if path is None or witness.known + len(path.tokens) > len(known) or not lattice.agrees(0, path.tokens):
        return witness, Outcome.KEPT
    if path.tokens != lattice.old_content and not completes(witness.matcher, path.tokens):
        return witness, Outcome.KEPT
    remembered = tuple(dict.fromkeys((*completions.found, *witness.completions)))[:_REMEMBERED]
    return replace(_on_path(witness, path, lattice, known), completions=remembered), Outcome.FOUND


def _horizon(known: np.ndarray, ends: frozenset[int], block_end: int) -> int:
    """The position after the searched part: after the block, and after the first committed end token, or the last
    committed token if none is an end token."""
    committed = np.flatnonzero(known >= 0)
    ended = committed[np.isin(known[committed], list(ends))]  # only end tokens may follow the first
    farthest = ended[:1] if len(ended) else committed[-1:]
    return max([block_end, *(int(position) + 1 for position in farthest)])


#: The best path found, if any, and the completions that the search used.
_Found = tuple[Path | None, Completions]


def _search(
    witness: Witness, lattice: TokenLattice, size: int, beam: Beam, in_time: Callable[[], bool], cache: ParserStateCache
) -> _Found:
    """A beam search for an answer of ``size`` positions, with the parser states of ``cache``."""
    answer = witness.tokens[: witness.length].tolist()
    before, follows = answer[: witness.known], answer[witness.known :][:1]
    completions = Completions(answer, size, lattice.lexicon, witness.completions, far_completion=cache.far_completion)
    root = cache.locate(before, lambda: cache.own_matcher(before) or witness.matcher.fork(), follows)
    return best_path(root, cache, lattice, completions, beam, in_time), completions


def _within_limits(search: Callable[[ParserStateCache], _Found], cache: ParserStateCache) -> _Found | None:
    """The result of ``search`` with a shared ``cache``; None if the limits of its parser are used up, maybe by other
    searches: results must not depend on them."""
    if cache.fresh:
        return search(cache)  # another fresh parser would return the same, and take as long to compile
    try:
        found = search(cache)
    except ParserBudgetExhausted:
        return None
    return None if cache.exhausted else found


def _on_path(witness: Witness, path: Path, lattice: TokenLattice, known: np.ndarray) -> Witness:
    """``witness`` with the tokens of ``path`` from the first masked position on, and end tokens after them."""
    tokens, length = witness.tokens.copy(), witness.known + len(path.tokens)
    tokens[witness.known : length] = path.tokens
    tokens[length:] = min(witness.ends)
    last = min(lattice.start + lattice.size, len(known))
    if length < last:
        tokens[length:last] = lattice.end_token[length - lattice.start : last - lattice.start]
    committed = known >= 0
    tokens[committed] = known[committed]
    return replace(witness, tokens=tokens, length=length)


#: Number of words up to which optional gaps are tried.
_WORDS = 200
#: Steps of a walk through a word of unknown text.
_STEPS = 400


def complete_sketch(matcher: Matcher, lexicon: Lexicon, sketch: Sketch, work: Work) -> Walk | None:
    """The completion that ``sketch`` gives from ``matcher`` on; None if the parser rejects it."""
    count = len(sketch.words)
    found = _read_sketch(matcher, lexicon, sketch, [False] * count, work)
    if found is not None or sketch.gap is None:
        return found
    gaps = [i > 0 for i in range(count)]
    found = _read_sketch(matcher, lexicon, sketch, gaps, work)
    for i in range(1, count if count <= _WORDS and found is not None else 0):
        gaps[i] = False
        shorter = _read_sketch(matcher, lexicon, sketch, gaps, work) if work.left else None
        gaps[i] = shorter is None
        found = shorter or found
    return found


def _read_sketch(matcher: Matcher, lexicon: Lexicon, sketch: Sketch, gaps: Sequence[bool], work: Work) -> Walk | None:
    """``sketch`` with gaps before the words marked in ``gaps``, if that is a completion."""
    at, tokens, choices = matcher.fork(), list[int](), list[int]()
    work.read(FORK)
    texts = [
        None if word is None else (sketch.gap or "") * gap + word for word, gap in zip(sketch.words, gaps, strict=True)
    ]
    for i, text in enumerate(texts):
        step = None if text is None else _bytewise(text, lexicon)
        if step is None:
            ahead = next((_bytewise(later, lexicon) for later in texts[i + 1 :] if later is not None), None)
            if text is not None or not _through(at, lexicon, tokens, choices, ahead, work):
                return None
            continue
        if not work.spend(len(step)):
            return None
        choices.append(len(tokens))
        try:
            at.consume(step)
        except ValueError:
            return None
        tokens += step
    return Walk(tuple(tokens), tuple(choices)) if at.accepting else None


def _through(
    at: Matcher, lexicon: Lexicon, tokens: list[int], choices: list[int], ahead: list[int] | None, work: Work
) -> bool:
    """Advance ``at`` through a word of unknown text, until ``ahead`` may follow, or to the end. Returns whether it
    succeeded."""
    step: list[int] = []  # rest of the latest step; the text after the word may begin in it
    for steps in range(_STEPS):
        if at.accepting if ahead is None else steps and at.valid(ahead) == len(ahead):
            return True
        if not step:
            step, chosen = onward(at, lexicon, tokens)
            if not step or not work.spend(MASK):
                return False
            if chosen:
                choices.append(len(tokens))
        try:
            at.consume(step[:1])
        except ValueError:
            return False
        tokens.append(step[0])
        step = step[1:]
    return False


def _bytewise(text: str, lexicon: Lexicon) -> list[int] | None:
    """Tokens that spell ``text``, single bytes if possible; None if there are none."""
    raw = text.encode()
    single = [lexicon.ids.get(raw[i : i + 1]) for i in range(len(raw))]
    known = [token for token in single if token is not None]
    return known if len(known) == len(single) else lexicon.cover(raw)


#: More tokens than any budget.
_ENDLESS = 1 << 30
#: Maximum parser states of a sketched sentence.
_SKETCHED = 4000


def find_first(
    grammar: Grammar,
    lexicon: Lexicon,
    budget: int,
    least: int = 0,
    report: Callable[[FirstAnswers], None] = lambda first: None,
    sketch: Sketch | None = None,
) -> FirstAnswers:
    """The shortest answers found under ``grammar``; the long search runs only if ``budget`` requires it.

    ``report`` is called with the result so far before a long search; ``sketch``: a known sentence as words.
    """
    begun = (
        None if sketch is None else complete_sketch(grammar.with_own_parser().start(), lexicon, sketch, Work(_SKETCHED))
    )
    near = find_completion(grammar.start(), lexicon, classes=grammar.classes, room=_ENDLESS, begun=begun)
    found = FirstAnswers(near, least=least)
    if found.covers(budget) and near is not None:
        return found
    report(found)
    bound = None if near is None else near.tokens
    patient = find_completion(
        grammar.with_own_parser().start(), lexicon, classes=grammar.classes, room=0, bound=bound, searched=True
    )
    return FirstAnswers(near, patient, asked=True, least=least)
