"""The child process: bombs end as typed refusals in time, and it goes on after each."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from constraint_bombs import ALL
from grammars import bundled_tokenizer, bundled_vocabulary
from llguidance import LLMatcher, LLParserLimits

from mmserve.constraint.compile import service, worker
from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.service import Compiler, Firsts, Grammars, Outcomes, key_of
from mmserve.constraint.compile.wire import BYTES, CompileReply, FirstAnswers, TokenTable
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import PARSER_LIMITS
from mmserve.constraint.search import first_witness as first
from mmserve.core.constraint import Choice, ConstraintKind, ConstraintMode, ConstraintSpec, JsonSchema, Lark, Regex
from mmserve.errors import InvalidArgument

PATIENCE = 60.0  # seconds; the limit itself is two, and the machine may be busy


def spec(kind: ConstraintKind, mode: ConstraintMode = ConstraintMode.STRICT) -> ConstraintSpec:
    return ConstraintSpec(kind, mode)


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(BYTES)
    yield made
    made.close()


@pytest.mark.parametrize("name", ALL)
def test_a_bomb_is_refused_with_its_place(grammars: Grammars, name: str) -> None:
    kind, pointer, keyword = ALL[name]
    began = time.monotonic()
    with pytest.raises(InvalidArgument) as caught:
        grammars.grammar(spec(kind))
    assert time.monotonic() - began < PATIENCE
    found = [(v.field.partition("#")[2], v.description.partition(":")[0]) for v in caught.value.violations]
    assert (pointer, keyword) in found
    assert all(len(v.description) < 1000 for v in caught.value.violations), "a refusal quotes the constraint"


def test_a_grammar_too_long_to_be_sent_is_refused_before_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "REPLY_BYTES", 3000)
    for text in ("a", "\u00e9"):  # one byte, and six where it is sent
        asked = spec(JsonSchema(json.dumps({"const": text * 1000})))
        outcome, broken = worker._outcome(asked, BYTES.trie())
        assert isinstance(outcome, Grammar) == (text == "a") and not broken
    assert "becomes a grammar of more than 3000 bytes; make it smaller" in str(outcome)


@pytest.mark.parametrize("mode", ConstraintMode)
def test_what_is_said_of_a_constraint_is_bounded(grammars: Grammars, mode: ConstraintMode) -> None:
    inner = {f"p{i}": {"type": "array", "uniqueItems": True} for i in range(150)}
    schema = {"type": "object", "properties": {"\u00e9" * 100_000: {"type": "object", "properties": inner}}}
    asked = spec(JsonSchema(json.dumps(schema, ensure_ascii=False)), mode)
    if mode is ConstraintMode.STRICT:
        with pytest.raises(InvalidArgument, match="uniqueItems") as caught:
            grammars.grammar(asked)
        told = [v.field for v in caught.value.violations]
    else:
        told = list(grammars.grammar(asked).warnings)
    assert len(told) == 100 and max(map(len, told)) < 1100


def test_many_threads_may_ask_at_once(grammars: Grammars) -> None:
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: texts.append(grammars.grammar(spec(Regex(f"a{{{i % 3 + 1}}}"))).text))
        for i in range(9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(texts) == 9
    assert len(set(texts)) == 3


def test_modes_differ_in_what_is_not_enforced(grammars: Grammars) -> None:
    schema = JsonSchema('{"type":"array","items":{"type":"integer"},"uniqueItems":true}')
    with pytest.raises(InvalidArgument, match="uniqueItems"):
        grammars.grammar(spec(schema))
    checked = grammars.grammar(spec(schema, ConstraintMode.VALIDATE))
    ignored = grammars.grammar(spec(schema, ConstraintMode.LENIENT))
    assert not checked.exact and not ignored.exact
    assert "is checked" in checked.warnings[0] and "is not enforced" in ignored.warnings[0]
    assert checked.text == ignored.text


def test_no_mode_takes_what_is_malformed(grammars: Grammars) -> None:
    for mode in ConstraintMode:
        with pytest.raises(InvalidArgument):
            grammars.grammar(spec(JsonSchema('{"type": "strin"}'), mode))


def test_an_outcome_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ConstraintSpec] = []
    real = Compiler.compile

    def counting(self: Compiler, one: ConstraintSpec) -> tuple[Grammar | Refused, bool]:
        asked.append(one)
        return real(self, one)

    monkeypatch.setattr(Compiler, "compile", counting)
    made = Grammars(BYTES)
    try:
        good, bad = spec(Regex("a+")), spec(Regex("("))
        assert made.grammar(good) == made.grammar(good)
        for _ in range(2):
            with pytest.raises(InvalidArgument):
                made.grammar(bad)
        assert asked == [good, bad]
    finally:
        made.close()


def test_a_constraint_is_compiled_anew_for_each_part_of_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ConstraintSpec] = []
    real = Compiler.begin

    def counting(self: Compiler, one: ConstraintSpec, budget: int | None) -> CompileReply:
        asked.append(one)
        return real(self, one, budget)

    monkeypatch.setattr(Compiler, "begin", counting)
    made = Grammars(BYTES, program=first.__name__)
    try:
        for kept, compiled in (("alice", 1), ("alice", 1), ("bob", 2), ("alice", 2)):
            made.first(spec(Regex("a+")), 8, kept)
            made.grammar(spec(Regex("a+")), kept)
            assert len(asked) == compiled, kept
    finally:
        made.close()


def test_a_search_that_ran_out_of_time_is_known_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=lambda: now[0]))
    late, firsts = FirstAnswers(asked=True, late=True), Firsts(2)
    firsts.put(b"late", late, 0.05)
    firsts.put(b"done", FirstAnswers(asked=True))
    assert firsts.get(b"late") is late
    now[0] += 0.06
    assert firsts.get(b"late") is None and firsts.get(b"done") is not None


def test_a_late_search_is_not_made_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    late = CompileReply(Grammar("a", True, ()), FirstAnswers(asked=True, late=True), lasting=False)
    asked: list[int | None] = []

    def begin(_compiler: Compiler, _spec: ConstraintSpec, budget: int | None) -> CompileReply:
        asked.append(budget)
        return late

    monkeypatch.setattr(Compiler, "begin", begin)
    made = Grammars(BYTES)
    try:
        for _ in range(3):
            assert made.first(spec(Regex("a")), 8) == (late.outcome, late.first)
        assert asked == [8]
    finally:
        made.close()


def test_the_cache_is_bounded_and_forgets_the_oldest() -> None:
    outcomes = Outcomes(10_000)
    for name in "abcdefghijkl":
        outcomes.put(name.encode(), Grammar(name * 500, True, ()))
        outcomes.get(b"a")
    assert outcomes.used <= 10_000
    assert outcomes.get(b"a") is not None
    assert outcomes.get(b"b") is None
    outcomes.put(b"large", Grammar("x" * 20_000, True, ()))
    assert outcomes.get(b"large") is None


def test_keys_tell_everything_apart() -> None:
    kinds: list[ConstraintKind] = [Regex("a"), Lark("a"), Choice(("a",)), Choice(("a", "b")), JsonSchema("a")]
    other = TokenTable((*BYTES.tokens[:-1], b"x"), 256)
    keys = {
        key_of(spec(kind, mode), vocabulary.fingerprint(), cache)
        for kind in kinds
        for mode in ConstraintMode
        for vocabulary in (BYTES, other)
        for cache in ("", "alice")
    }
    assert len(keys) == len(kinds) * 3 * 2 * 2
    assert all(len(key) == 32 for key in keys)


def test_grammars_are_proved_with_the_models_own_tokens() -> None:
    vocabulary = bundled_vocabulary()
    made = Grammars(vocabulary)
    try:
        schema = '{"type":"object","properties":{"shape":{"enum":["circle","square"]},"n":{"type":"integer"}}}'
        text = made.grammar(spec(JsonSchema(schema))).text
        with pytest.raises(InvalidArgument, match="has no sentence"):
            made.grammar(spec(JsonSchema('{"type":"string","pattern":"^\\\\u0001$"}')))
    finally:
        made.close()
    at = LLMatcher(vocabulary.trie(), text, limits=LLParserLimits(**PARSER_LIMITS))
    written = bundled_tokenizer().encode('{"shape": "circle", "n": 3}', add_special_tokens=False)
    assert at.consume_tokens(written) and at.is_accepting()


def test_long_tokens_do_no_harm() -> None:
    """llguidance panics over them while it builds its trie."""
    made = Grammars(TokenTable((*BYTES.tokens[:256], b"x" * 100_000, b""), 257))
    try:
        assert made.grammar(spec(Regex("x+"))).exact
    finally:
        made.close()


def test_lone_surrogates_pass_the_pipe(grammars: Grammars) -> None:
    with pytest.raises(InvalidArgument, match="surrogate"):
        grammars.grammar(spec(Lark('start: "\ud800"')))
