"""Searches that know where others have been find what they find alone, and never less than they had."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from llguidance import LLParserLimits

from mmserve.bench.copyist import Copyist, written
from mmserve.bench.schemas import SCHEMAS
from mmserve.bench.search import Language, made_up
from mmserve.constraint.compile.grammar import grammar_of
from mmserve.constraint.limits import PARSER_LIMITS
from mmserve.constraint.search.lattice import TopK
from mmserve.constraint.search.matcher import Grammar, Matcher, completes
from mmserve.constraint.search.parser_states import ParserState, ParserStateCache, SharedParserStates
from mmserve.constraint.search.witness import Outcome, Witness, admit, advance, improve
from mmserve.constraint.session.answer import ConstrainedAnswer
from mmserve.core.constraint import ConstraintSpec, JsonSchema, Regex
from mmserve.memory import resident, trim

SIZE = 64
NAMES = ("person", "matrix", "payment", "account")


@cache
def language() -> Language:
    return made_up(2000)


@cache
def grammar(name: str) -> Grammar:
    wanted = next(each for each in SCHEMAS if each.name == name)
    return Grammar(grammar_of(ConstraintSpec(JsonSchema(json.dumps(wanted.schema)))).text, language().vocabulary)


def model(name: str, seed: int) -> Copyist:
    """Has a document in mind that may be of another prefix_class."""
    rng = random.Random(f"{name} {seed}")
    document = rng.choice(rng.choice([each for each in SCHEMAS if seed % 2 or each.name == name]).documents)
    ids = language().lexicon.cover(written(document).encode())
    assert ids is not None
    return Copyist(ids, 0, rng, accuracy=0.5)


def score(witness: Witness, top: TopK) -> float:
    """Of the witness's tokens at ``top``'s positions; for those that are no candidates, a little less than the last."""
    same = top.tokens == witness.tokens[top.positions][:, None]
    listed = np.where(same, top.log_probabilities, -np.inf).max(-1)
    return float(np.where(same.any(-1), listed, top.log_probabilities.min(-1) - 1).sum())


def steps(name: str, seed: int, size: int, states: Callable[[], ParserStateCache]) -> Iterator[tuple[Witness, Outcome]]:
    """What a request of ``size`` positions finds in each step; each asks for the ``states`` it has."""
    source, known, lexicon = model(name, seed), np.full(size, -1, np.int64), language().lexicon
    witness = admit(grammar(name), lexicon, size)
    while (known < 0).any() and witness.known <= witness.length:
        end = min((int(np.flatnonzero(known < 0)[0]) // 32 + 1) * 32, size)
        here = np.flatnonzero(known[:end] < 0)
        top = source.candidates(known, here)
        found, outcome = improve(witness, known, top, end, lexicon, states=states(), seconds=60)
        assert completes(grammar(name).start(), found.tokens[: found.length].tolist())
        assert score(found, top) >= score(witness, top) - 1e-3
        yield found, outcome
        mine = np.where(top.tokens == found.tokens[here][:, None], top.log_probabilities, -20).max(-1)
        content = here < found.length if (here < found.length).any() else np.ones(len(here), bool)
        sure = content & (mine > np.log(0.9))
        chosen = here[sure] if sure.any() else here[[np.where(content, mine, -np.inf).argmax()]]
        known[chosen] = found.tokens[chosen]
        witness = advance(found, known)


def told(found: Iterable[tuple[Witness, Outcome]]) -> list[tuple[list[int], Outcome]]:
    return [(witness.tokens.tolist(), outcome) for witness, outcome in found]


def new(name: str) -> ParserStateCache:
    return ParserStateCache(language().lexicon, grammar(name).classes)


@cache
def alone(name: str, seed: int, size: int) -> list[tuple[list[int], Outcome]]:
    """What a request finds that knows nothing of any other step."""
    return told(steps(name, seed, size, lambda: new(name)))


@pytest.mark.parametrize("name", NAMES)
def test_what_other_searches_have_learned_changes_nothing(name: str) -> None:
    """Requests of several sizes with other documents in mind go before, and one goes on meanwhile."""
    states = new(name)
    assert told(steps(name, 0, SIZE, lambda: states)) == alone(name, 0, SIZE)
    other = steps(name, 1, SIZE + 20, lambda: states)
    again = []
    for each in steps(name, 0, SIZE, lambda: states):
        again.append(each)
        next(other, None)
    assert told(again) == alone(name, 0, SIZE)
    assert told(steps(name, 1, SIZE, lambda: states)) == alone(name, 1, SIZE)


def test_places_that_are_too_many_are_forgotten_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    states, limit = new("payment"), 1_000_000
    list(steps("payment", 0, SIZE, lambda: states))
    assert states.size > limit
    monkeypatch.setattr("mmserve.constraint.search.parser_states.LIMIT", limit)
    states, sizes = new("payment"), list[int]()
    found = []
    for each in steps("payment", 0, SIZE, lambda: states):
        found.append(each)
        sizes.append(states.size)
    assert told(found) == alone("payment", 0, SIZE)
    assert 0 in sizes and 0 < max(sizes) <= limit


def test_the_parser_of_searches_is_made_once_whatever_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compile a large grammar anew takes half a second, for which all requests of a decode batch would wait."""
    monkeypatch.setattr("mmserve.constraint.search.parser_states.LIMIT", 200_000)
    made, forgotten = list[int](), list[int]()

    def parser() -> Matcher:
        made.append(1)
        return grammar("payment").with_own_parser().start()

    states = ParserStateCache(language().lexicon, grammar("payment").classes, parser)
    forget = states._discard

    def counted() -> None:
        forgotten.append(1)
        forget()

    monkeypatch.setattr(states, "_discard", counted)
    grown = iter(range(0, 1 << 40, 20 << 20))  # as the parser of a large grammar grows in searches
    monkeypatch.setattr("mmserve.constraint.search.parser_states.resident", lambda: next(grown))
    assert told(steps("payment", 0, SIZE, lambda: states)) == alone("payment", 0, SIZE)
    assert len(forgotten) > 1
    assert len(made) == 1


def test_threads_that_share_places_find_what_they_find_alone() -> None:
    shared = SharedParserStates(language().lexicon)
    with ThreadPoolExecutor(2) as threads:
        ran = list(
            threads.map(lambda seed: told(steps("account", seed, SIZE, lambda: shared.of(grammar("account")))), (0, 1))
        )
    assert ran == [alone("account", 0, SIZE), alone("account", 1, SIZE)]


def test_a_search_that_fails_leaves_nothing_behind() -> None:
    states = new("person")
    list(steps("person", 0, SIZE, lambda: states))
    assert states.size
    with pytest.raises(RuntimeError, match="parser"), states.acquire():
        raise RuntimeError("the parser failed")
    assert not states.size
    assert told(steps("person", 0, SIZE, lambda: states)) == alone("person", 0, SIZE)


@pytest.mark.parametrize("pattern", ["[ab]*a[ab]{20}", "([ab]*a[ab]{20})?"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_parser_that_others_have_spent_changes_nothing(pattern: str, shared: bool) -> None:
    """What its lexer learns is bounded, and shared by all matchers of a grammar: those of requests that are over."""
    lexicon, limits = language().lexicon, LLParserLimits(**PARSER_LIMITS)
    text = grammar_of(ConstraintSpec(Regex(pattern))).text
    letters = [lexicon.ids[b"a"], lexicon.ids[b"b"]]
    rng = random.Random(0)

    def new_grammar() -> Grammar:
        return Grammar(text, language().vocabulary, limits)

    def search(of: Grammar, states: ParserStateCache, wish: str = "a") -> tuple[list[int], Outcome]:
        tokens = np.tile(letters if wish == "a" else letters[::-1], (30, 1))
        top = TopK(np.arange(30), tokens, np.full((30, 2), np.log([[0.9, 0.1]]), np.float32))
        witness = admit(of, lexicon, 30)
        found, outcome = improve(witness, np.full(30, -1), top, 30, lexicon, states=states, seconds=60)
        return found.tokens.tolist(), outcome

    def new_places(of: Grammar) -> ParserStateCache:
        return ParserStateCache(lexicon, of.classes, (lambda: of.with_own_parser().start()) if shared else None)

    alone = search(new_grammar(), new_places(new_grammar()))
    assert alone[1] is Outcome.FOUND
    first = new_grammar()
    states = new_places(first)
    assert search(first, states, "b") != alone and states.size
    own = states.own_matcher(()) or first.start()
    while own.valid(rng.choices(letters, k=200)) == 200:
        pass
    assert not own.valid(letters[:1]), "it denies everything"
    for _ in range(2):
        assert search(new_grammar(), states) == alone
    assert states.size, "states of a parser that can go on are kept"


def test_a_parser_is_compiled_once_in_a_search_that_spends_it() -> None:
    """One that only this search has used is not replaced within it: another would come to the same limits."""
    lexicon, compiled = language().lexicon, list[int]()
    limits = LLParserLimits(**{**PARSER_LIMITS, "max_lexer_states": 150})
    text = grammar_of(ConstraintSpec(Regex("[ab]*a[ab]{20}"))).text

    class Counted(Grammar):
        def with_own_parser(self) -> Grammar:
            compiled.append(1)
            return super().with_own_parser()

    letters = np.array([lexicon.ids[b"a"], lexicon.ids[b"b"]])
    rows = np.array([np.roll(letters, shift) for shift in random.Random(0).choices((0, 1), k=30)])
    top = TopK(np.arange(30), rows, np.full((30, 2), np.log([[0.9, 0.1]]), np.float32))
    of = Counted(text, language().vocabulary, limits)
    states = SharedParserStates(lexicon).of(of)
    witness = replace(admit(Grammar(text, language().vocabulary), lexicon, 30), language=of)
    found = [improve(witness, np.full(30, -1), top, 30, lexicon, states=states, seconds=60) for _ in range(2)]
    assert not states.size, "what a spent parser has is not kept"
    assert len(compiled) == 2 and found[0][1] == found[1][1]
    assert found[0][0].tokens.tolist() == found[1][0].tokens.tolist()


def test_a_search_never_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "mmserve.constraint.search.parser_states.resident", lambda: 0
    )  # else all growth counts as its own
    states = new("person")
    with states.acquire() as mine, ThreadPoolExecutor(1) as thread:
        assert mine is states
        ran = thread.submit(lambda: told(steps("person", 0, SIZE, lambda: states))).result(timeout=60)
    assert ran == alone("person", 0, SIZE)
    assert not states.size, "the other search had states of its own"


def test_a_parser_that_has_read_much_gives_way_to_one_that_has_read_little() -> None:
    """A copy of a parser takes time for all that it has read: a long answer shall not slow those after it."""
    lexicon = language().lexicon
    free = Grammar(grammar_of(ConstraintSpec(JsonSchema('{"type": "string"}'))).text, language().vocabulary)
    states = ParserStateCache(lexicon, free.classes)

    def at(text: bytes) -> ParserState:
        matcher, tokens = free.start(), lexicon.cover(text) or []
        matcher.consume(tokens)
        return states.locate(tokens, lambda: matcher)

    quote = lexicon.ids[b'"']
    with states.acquire():
        long = at(b'"' + b"a" * 3000)
        over, size = states.after(long, quote), states.size
        assert over is not None and over.depth == 3002
        short = at(b'"a')
        assert short is long and short.depth == 2, "what is left of a string is the same"
        assert states.after(short, quote) is over and over.depth == 3
        assert states.size < size - 1_000_000


def test_places_are_kept_for_the_grammars_asked_for_last_and_only_so_many() -> None:
    limit = 2_000_000
    shared = SharedParserStates(language().lexicon, limit)
    first = shared.of(grammar("person"))
    assert shared.of(grammar("person")) is first
    assert shared.of(grammar("person"), "another tenant") is not first
    list(steps("person", 0, SIZE, lambda: first))
    second = shared.of(grammar("matrix"))
    assert shared.used <= limit
    assert shared.of(grammar("person")) is not first
    assert shared.of(grammar("matrix")) is second


def test_the_old_witness_is_the_best_where_the_model_says_it() -> None:
    lexicon = language().lexicon
    witness = admit(grammar("payment"), lexicon, SIZE)
    tokens = np.stack([witness.tokens, np.full(SIZE, 9)], 1)
    top = TopK(np.arange(SIZE), tokens, np.full((SIZE, 2), np.log([[0.6, 0.4]]), np.float32))
    found, outcome = improve(witness, np.full(SIZE, -1), top, SIZE, lexicon, seconds=60)
    assert outcome is Outcome.FOUND and found.tokens.tolist() == witness.tokens.tolist()


def test_a_parser_that_has_learned_all_that_it_may_holds_few_bytes() -> None:
    """An expression for whose texts a lexer needs ever more states; its parser keeps them as long as it lives."""
    rng, lexicon = random.Random(0), language().lexicon
    letters = [lexicon.ids[b"a"], lexicon.ids[b"b"]]
    text = grammar_of(ConstraintSpec(Regex("([a-z]*a[a-z]{16}|[b-y]*c[a-z]{15})+"))).text
    language().vocabulary.within(b"ab")  # what is made once for all grammars
    trim()
    before = resident()
    start = Grammar(text, language().vocabulary, LLParserLimits(**PARSER_LIMITS)).start()
    rounds = 0
    while start.valid(letters):
        matcher, rounds = start.fork(), rounds + 1
        assert rounds < 200, "it comes to its limit"
        with contextlib.suppress(ValueError):
            for _ in range(30):
                matcher.consume(rng.choices(letters, k=3))
                matcher.mask()
    held = resident() - before
    assert held < 24 << 20, f"{held >> 20} MiB"


def test_an_answer_whose_parser_has_reached_its_limits_goes_on_with_another() -> None:
    """It ended as its latest witness did, which before the first search is the shortest answer."""
    lexicon, rng, size = language().lexicon, random.Random(0), 40
    text = grammar_of(ConstraintSpec(Regex("[ab]*a[ab]{20}"))).text
    spent = Grammar(text, language().vocabulary, LLParserLimits(**PARSER_LIMITS))
    answer = ConstrainedAnswer(admit(spent, lexicon, size), lexicon)
    letters, sample = [lexicon.ids[b"b"], lexicon.ids[b"a"]], spent.start()
    while sample.valid(rng.choices(letters, k=200)) == 200:
        pass
    known = np.full(size, -1)
    for position in range(size):
        best = np.array([letters]), np.log(np.array([[0.9, 0.1]], np.float32))
        answer.search(known, TopK(np.array([position]), *best), position + 1)
        known[position] = answer.witness.tokens[position]
        answer.advance(known)
    assert answer.parsers == 1 and not answer.broken
    written_text = lexicon.text(answer.witness.tokens[: answer.witness.length].tolist())
    assert re.fullmatch(rb"b{10,}a[ab]{20}", written_text)
