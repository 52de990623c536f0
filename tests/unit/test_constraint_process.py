"""The child process: bombs end as typed refusals in time, and it goes on after each."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from constraint_bombs import ALL
from grammars import bundled_tokenizer, bundled_vocabulary, byte_trie, granted
from llguidance import LLMatcher, LLParserLimits

from mmserve.constraint.compile import service
from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.service import Compiler, Grammars, Replies, key_of
from mmserve.constraint.compile.wire import BYTES, CompileReply, Completion, FirstAnswers, TokenTable
from mmserve.constraint.limits import LATE_SECONDS, PARSER_LIMITS
from mmserve.constraint.search import worker
from mmserve.constraint.search.vocabulary import Vocabulary
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
        granted(grammars, spec(kind))
    assert time.monotonic() - began < PATIENCE
    found = [(v.field.partition("#")[2], v.description.partition(":")[0]) for v in caught.value.violations]
    assert (pointer, keyword) in found
    assert all(len(v.description) < 1000 for v in caught.value.violations), "a refusal quotes the constraint"


def test_a_grammar_too_long_to_be_sent_is_refused_before_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "REPLY_BYTES", 3000)
    for text in ("a", "\u00e9"):  # one byte, and six where it is sent
        asked = spec(JsonSchema(json.dumps({"const": text * 1000})))
        outcome, broken = worker._outcome(asked, byte_trie())
        assert isinstance(outcome, Grammar) == (text == "a") and not broken
    assert "becomes a grammar of more than 3000 bytes; make it smaller" in str(outcome)


@pytest.mark.parametrize("mode", ConstraintMode)
def test_what_is_said_of_a_constraint_is_bounded(grammars: Grammars, mode: ConstraintMode) -> None:
    inner = {f"p{i}": {"type": "array", "uniqueItems": True} for i in range(150)}
    schema = {"type": "object", "properties": {"\u00e9" * 100_000: {"type": "object", "properties": inner}}}
    asked = spec(JsonSchema(json.dumps(schema, ensure_ascii=False)), mode)
    if mode is ConstraintMode.STRICT:
        with pytest.raises(InvalidArgument, match="uniqueItems") as caught:
            granted(grammars, asked)
        told = [v.field for v in caught.value.violations]
    else:
        told = list(granted(grammars, asked).warnings)
    assert len(told) == 100 and max(map(len, told)) < 1100


def test_many_threads_may_ask_at_once(grammars: Grammars) -> None:
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: texts.append(granted(grammars, spec(Regex(f"a{{{i % 3 + 1}}}"))).text))
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
        granted(grammars, spec(schema))
    checked = granted(grammars, spec(schema, ConstraintMode.VALIDATE))
    ignored = granted(grammars, spec(schema, ConstraintMode.LENIENT))
    assert not checked.exact and not ignored.exact
    assert "is checked" in checked.warnings[0] and "is not enforced" in ignored.warnings[0]
    assert checked.text == ignored.text


def test_no_mode_takes_what_is_malformed(grammars: Grammars) -> None:
    for mode in ConstraintMode:
        with pytest.raises(InvalidArgument):
            granted(grammars, spec(JsonSchema('{"type": "strin"}'), mode))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ConstraintSpec]:
    """The constraints that are compiled from now on."""
    found: list[ConstraintSpec] = []
    real = Compiler.compile

    def counting(self: Compiler, one: ConstraintSpec, budget: int | None = None) -> CompileReply:
        found.append(one)
        return real(self, one, budget)

    monkeypatch.setattr(Compiler, "compile", counting)
    return found


def test_an_outcome_is_compiled_once(grammars: Grammars, asked: list[ConstraintSpec]) -> None:
    good, bad = spec(Regex("once+")), spec(Regex("("))
    assert granted(grammars, good) == granted(grammars, good)
    for _ in range(2):
        with pytest.raises(InvalidArgument):
            granted(grammars, bad)
    assert asked == [good, bad]


def test_a_constraint_is_compiled_anew_for_each_part_of_the_caches(
    grammars: Grammars, asked: list[ConstraintSpec]
) -> None:
    for kept, compiled in (("alice", 1), ("alice", 1), ("bob", 2), ("alice", 2)):
        grammars.first(spec(Regex("a+")), 8, kept)
        assert len(asked) == compiled, kept


LATE = CompileReply(Grammar("a", True, ()), False, FirstAnswers(asked=True, late=True))


def test_a_search_that_ran_out_of_time_is_known_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=lambda: now[0]))
    replies = Replies(10_000)
    replies.put(b"late", LATE)
    replies.put(b"done", CompileReply(Grammar("a", True, ()), True, FirstAnswers(asked=True)))
    now[0] += LATE_SECONDS
    assert replies.get(b"late") is LATE
    now[0] += 0.01
    assert replies.get(b"late") is None and replies.get(b"done") is not None


def test_a_late_search_is_not_made_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def compile_(_compiler: Compiler, _spec: ConstraintSpec, budget: int | None) -> CompileReply:
        asked.append(budget)
        return LATE

    monkeypatch.setattr(Compiler, "compile", compile_)
    made = Grammars(BYTES)
    try:
        for _ in range(3):
            assert made.first(spec(Regex("a")), 8) == (LATE.outcome, LATE.first, LATE.seconds)
        assert asked == [8]
    finally:
        made.close()


def test_the_cache_is_bounded_and_forgets_the_oldest() -> None:
    replies = Replies(10_000)
    for name in "abcdefghijkl":
        replies.put(name.encode(), CompileReply(Grammar(name * 500, True, ())))
        replies.get(b"a")
    assert replies.used <= 10_000
    assert replies.get(b"a") is not None
    assert replies.get(b"b") is None
    replies.put(b"large", CompileReply(Grammar("x" * 20_000, True, ())))
    assert replies.get(b"large") is None
    replies.put(b"a", CompileReply(Grammar("", True, ())))
    used = replies.used
    replies.put(b"a", CompileReply(Grammar("", True, ()), True, FirstAnswers(Completion((1,) * 200, True))))
    assert replies.used >= used + 200, "an entry in place of another, with an answer of 200 tokens"


def test_keys_tell_everything_apart() -> None:
    kinds: list[ConstraintKind] = [Regex("a"), Lark("a"), Choice(("a",)), Choice(("a", "b")), JsonSchema("a")]
    other = TokenTable((*BYTES.tokens[:-1], b"x"), (256,))
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
        text = granted(made, spec(JsonSchema(schema))).text
        with pytest.raises(InvalidArgument, match="has no sentence"):
            granted(made, spec(JsonSchema('{"type":"string","pattern":"^\\\\u0001$"}')))
    finally:
        made.close()
    at = LLMatcher(Vocabulary.of(vocabulary).trie, text, limits=LLParserLimits(**PARSER_LIMITS))
    written = bundled_tokenizer().encode('{"shape": "circle", "n": 3}', add_special_tokens=False)
    assert at.consume_tokens(written) and at.is_accepting()


def test_long_tokens_do_no_harm() -> None:
    """llguidance panics over them while it builds its trie."""
    made = Grammars(TokenTable((*BYTES.tokens[:256], b"x" * 100_000, b""), (257,)))
    try:
        assert granted(made, spec(Regex("x+"))).exact
    finally:
        made.close()


def test_lone_surrogates_pass_the_pipe(grammars: Grammars) -> None:
    with pytest.raises(InvalidArgument, match="surrogate"):
        granted(grammars, spec(Lark('start: "\ud800"')))
