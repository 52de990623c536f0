"""The least number of tokens to the end of a text, against brute force, and completions where that is too much."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLParserLimits

from mmserve.bench.search import made_up
from mmserve.constraint.compile.grammar import grammar_of
from mmserve.constraint.limits import PARSER_LIMITS
from mmserve.constraint.search import shortest_completion
from mmserve.constraint.search.completion import Work, walk
from mmserve.constraint.search.matcher import Grammar, GrammarMatcher, completes
from mmserve.constraint.search.shortest_completion import Effort, find_completion, quick_completion
from mmserve.constraint.search.vocabulary import Lexicon, Vocabulary
from mmserve.constraint.search.witness import find_first
from mmserve.core.constraint import ConstraintSpec, JsonSchema, Regex

TOY = [b"a", b"b", b"ab", b"bba", b"-", b""]
BYTES = Vocabulary.spelled([*(bytes([b]) for b in range(256)), b'{"', b'":', b'","', b'"}', b'""', b"null", b""], {262})


def oracle_least(pattern: str, pieces: list[bytes], longest: int) -> int | None:
    """Fewest pieces whose concatenation matches the whole pattern."""
    for n in range(longest + 1):
        if any(re.fullmatch(pattern.encode(), b"".join(row)) for row in product(pieces, repeat=n)):
            return n
    return None


@pytest.mark.parametrize(
    "pattern",
    ["(ab)*", "a{3,5}b+", "(a|bb)+-(a|bb)+", "b*-?a{4}", "(ab|ba){2,3}-", "", "a?b?a?-a{2}", "(bba|-a){2}b{3}"],
)
def test_the_exact_search_agrees_with_brute_force(pattern: str) -> None:
    vocabulary = Vocabulary.spelled(TOY, {5})
    lexicon = Lexicon.of(vocabulary.token_bytes)
    matcher = Grammar(f"start: /{pattern}/" if pattern else 'start: ""', vocabulary).start()
    close = find_completion(matcher, lexicon)
    assert close is not None
    assert close.exact
    assert completes(matcher, close.tokens)
    assert len(close.tokens) == oracle_least(pattern, TOY[:5], 7)
    for token in range(5):  # and from every state one token on
        if matcher.valid([token]):
            fork = matcher.fork()
            fork.consume([token])
            rest = find_completion(fork, lexicon)
            assert rest is not None
            assert len(rest.tokens) >= len(close.tokens) - 1


@pytest.mark.parametrize("pattern", ["(ab)*", "a{3,5}b+", "b*-?a{4}", "(ab|ba){2,3}-", "a?b?a?-a{2}"])
def test_the_search_by_bytes_is_an_upper_bound(pattern: str) -> None:
    vocabulary = Vocabulary.spelled(TOY, {5})
    lexicon = Lexicon.of(vocabulary.token_bytes)
    matcher = Grammar(f"start: /{pattern}/", vocabulary).start()
    close = find_completion(matcher, lexicon, Effort(exact_tokens=0, patient_tokens=0))
    exact = find_completion(matcher, lexicon)
    assert close is not None and exact is not None
    assert completes(matcher, close.tokens)
    assert len(close.tokens) >= len(exact.tokens)
    if close.exact:
        assert len(close.tokens) == len(exact.tokens)


def of(**properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "most"),
    [
        (of(a={"type": "string"}), 5),  # {" a ": "" }
        (of(a={"type": "string"}, b={"type": "integer"}), 10),
        ({"type": "array", "items": {"type": "string"}, "minItems": 5}, 11),
        (of(a={"type": "array", "items": of(b={"type": "null"}), "minItems": 2}), 17),
        ({"enum": ["aaaaaaaaaa", "xyz"]}, 5),
        (of(a={"type": "string", "minLength": 20}), 25),
        ({"type": "object"}, 2),
        ({"anyOf": [of(kind={"const": "circle"}, r={"type": "number"}), of(w={"type": "number"})]}, 6),
    ],
)
def test_short_documents_are_found(schema: dict[str, object], most: int) -> None:
    lexicon = Lexicon.of(BYTES.token_bytes)
    grammar = Grammar(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}), BYTES)
    close = find_completion(grammar.start(), lexicon)
    assert close is not None
    assert len(close.tokens) <= most
    assert completes(grammar.start(), close.tokens)
    document = lexicon.text(close.tokens).decode()
    assert jsonschema_rs.is_valid(schema, json.loads(document))
    quick = quick_completion(grammar.start(), lexicon, 400)
    assert quick is not None
    assert completes(grammar.start(), quick)
    assert len(quick) >= len(close.tokens)


def test_a_rare_way_out_of_a_loop_is_found() -> None:
    lexicon = Lexicon.of(BYTES.token_bytes)
    close = find_completion(Grammar("start: /[a-z]*q;/", BYTES).start(), lexicon)
    assert close is not None
    assert lexicon.text(close.tokens) == b"q;"


def test_a_closer_that_leads_nowhere_is_left() -> None:
    """Zeros may follow a zero for ever, and none of them is above zero."""
    lexicon = Lexicon.of(BYTES.token_bytes)
    schema = {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "minItems": 2}
    matcher = Grammar(LLMatcher.grammar_from_json_schema(schema), BYTES).start()
    close, quick = find_completion(matcher, lexicon), quick_completion(matcher, lexicon, 100)
    assert close is not None and quick is not None
    assert jsonschema_rs.is_valid(schema, json.loads(lexicon.text(quick)))
    assert lexicon.text(close.tokens) == b"[0.1,0.1]"


ITEM = of(
    id={"type": "integer", "minimum": 1},
    name={"type": "string", "minLength": 3},
    price={"type": "number", "exclusiveMinimum": 0},
    kind={"enum": ["circle", "square", "box"]},
    ok={"type": "boolean"},
)


def least_of(schema: dict[str, object], vocabulary: Vocabulary) -> int:
    """Tokens of the shortest answer found, which is checked."""
    lexicon = Lexicon.of(vocabulary.token_bytes)
    text = grammar_of(ConstraintSpec(JsonSchema(json.dumps(schema)))).text
    close = find_first(Grammar(text, vocabulary, LLParserLimits(**PARSER_LIMITS)), lexicon, 1 << 20).shortest(1 << 20)
    assert close is not None and jsonschema_rs.is_valid(schema, json.loads(lexicon.text(close.tokens)))
    return len(close.tokens)


@pytest.mark.parametrize(
    ("item", "many"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 200),
        (ITEM, 300),
        ({"anyOf": [of(kind={"const": "circle"}, r={"type": "number"}), of(w={"minimum": 10, "type": "number"})]}, 60),
    ],
)
@pytest.mark.parametrize("words", [BYTES, None])
def test_a_long_array_takes_what_its_items_take(item: dict[str, object], many: int, words: Vocabulary | None) -> None:
    """However long it is: each item more takes what the second takes beside the first."""
    vocabulary = words or made_up(2000).vocabulary
    one, two, all_of_them = (
        least_of({"type": "array", "items": item, "minItems": n, "maxItems": n}, vocabulary) for n in (1, 2, many)
    )
    assert all_of_them <= one + (many - 1) * (two - one)


def test_a_long_text_is_made_of_long_tokens() -> None:
    assert least_of({"type": "string", "minLength": 2000}, made_up(2000).vocabulary) < 150


def test_an_empty_language_has_no_completion() -> None:
    lexicon = Lexicon.of(BYTES.token_bytes)
    endless = Grammar('start: "a" start', BYTES).start()
    assert find_completion(endless, lexicon, Effort(exact_tokens=50, patient_tokens=50, states=200)) is None
    assert quick_completion(endless, lexicon, 50) is None


@pytest.mark.parametrize("text", [b"", b"abba", b"bbab-a", b"aabbbaab"])
def test_cover_is_the_fewest_tokens(text: bytes) -> None:
    lexicon = Lexicon.of(TOY)
    tokens = lexicon.cover(text)
    assert tokens is not None
    assert lexicon.text(tokens) == text
    assert not any(b"".join(row) == text for n in range(len(tokens)) for row in product(TOY[:5], repeat=n))


def test_cover_of_bytes_that_no_token_has() -> None:
    lexicon = Lexicon.of(TOY)
    assert lexicon.cover(b"ax") is None and lexicon.cover(b"ax") is None


def test_a_cover_is_its_askers_own_and_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmserve.constraint.search.vocabulary._KNOWN", 3)
    lexicon = Lexicon.of(TOY)
    texts = [bytes(letters) for n in (1, 2, 3) for letters in product(b"ab", repeat=n)]
    first = [lexicon.cover(text) for text in texts]
    for tokens in first:
        assert tokens is not None and len(lexicon._known) <= 3
        tokens.append(-1)
    assert [lexicon.cover(text) for text in texts] == [tokens[:-1] for tokens in first if tokens]


def test_a_refusal_is_no_more_work_than_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short constraint can ask for a long answer: whoever sends it must not keep all others waiting."""
    searches: list[int] = []
    original = shortest_completion.shorten

    def shorten(*args: Any, **options: Any) -> list[int]:
        searches.append(1)
        return original(*args, **options)

    monkeypatch.setattr(shortest_completion, "shorten", shorten)
    close = find_first(Grammar("start: /[a-d]{60}/", BYTES), Lexicon.of(BYTES.token_bytes), 8).shortest(8)
    assert close is not None and len(close.tokens) == 60
    assert len(searches) == 1, "the search by bytes is done once, and its result kept for the exact one"


@pytest.mark.parametrize("pattern", ["[a-d]{900}", "[\u0400-\u04ff]{900}", "((a|b){20}){20}", "([a-c]{20}-){20}"])
def test_the_work_of_a_long_answer_is_bounded(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in tokens that the parser reads and copies of it; a bound on states alone let them be 31 million."""
    work = {"reads": 0, "forks": 0}
    valid, consume, fork = GrammarMatcher.valid, GrammarMatcher.consume, GrammarMatcher.fork

    def counted_valid(self: GrammarMatcher, tokens: Sequence[int]) -> int:
        reach = valid(self, tokens)
        work["reads"] += reach + 1
        return reach

    def counted_consume(self: GrammarMatcher, tokens: Sequence[int]) -> None:
        work["reads"] += len(tokens)
        consume(self, tokens)

    def counted_fork(self: GrammarMatcher) -> GrammarMatcher:
        work["forks"] += 1
        return fork(self)

    monkeypatch.setattr(GrammarMatcher, "valid", counted_valid)
    monkeypatch.setattr(GrammarMatcher, "consume", counted_consume)
    monkeypatch.setattr(GrammarMatcher, "fork", counted_fork)
    grammar = Grammar(f"start: /{pattern}/", BYTES)
    close = find_first(grammar, Lexicon.of(BYTES.token_bytes), 8).shortest(8)
    assert close is not None and completes(grammar.start(), close.tokens)
    assert work["reads"] < 1.5 * Work(states=0).reads < 10_000_000
    assert work["forks"] < 50_000


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("data:image/png;base64,", "data:image/png;base64,"),
        ("^pbj:([a-z]+):([0-9]+-[0-9]+)$", "pbj:a:0-0"),
        ("(.+/)?.+:.+END", None),
    ],
)
def test_strings_that_must_hold_a_word_are_brought_to_their_end(pattern: str, text: str | None) -> None:
    schema = of(
        a={"type": "string", "pattern": pattern}, b={"type": "integer"}, c={"type": "string", "pattern": pattern}
    )
    vocabulary = Vocabulary.spelled([*(bytes([b]) for b in range(256)), b""], {256})
    lexicon = Lexicon.of(vocabulary.token_bytes)
    grammar = Grammar(grammar_of(ConstraintSpec(JsonSchema(json.dumps(schema)))).text, vocabulary)
    walked = walk(grammar.start(), lexicon, Work(4000), grammar.classes())
    assert walked is not None and completes(grammar.start(), walked.tokens)
    answer = json.loads(lexicon.text(walked.tokens))
    assert jsonschema_rs.is_valid(schema, answer)
    assert text is None or answer["a"] == answer["c"] == text


def test_an_expression_that_must_hold_a_word_is_brought_to_its_end() -> None:
    vocabulary = Vocabulary.spelled([*(bytes([b]) for b in range(256)), b""], {256})
    lexicon = Lexicon.of(vocabulary.token_bytes)
    grammar = Grammar(grammar_of(ConstraintSpec(Regex(r"[\s\S]*the word[\s\S]*"))).text, vocabulary)
    walked = walk(grammar.start(), lexicon, Work(4000), grammar.classes())
    assert walked is not None and lexicon.text(walked.tokens) == b"the word"
