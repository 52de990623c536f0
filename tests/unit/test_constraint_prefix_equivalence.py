"""Texts of one class have the same continuations, and the least number of tokens is what brute force says it is."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import jsonschema_rs
import pytest
from grammars import grammar, schema_matcher, sentence
from schema_zoo import Schema, of, zoo

from mmserve.constraint.compile.expression import BadPattern
from mmserve.constraint.findings import Refused
from mmserve.constraint.search.matcher import Grammar, completes
from mmserve.constraint.search.prefix_equivalence import PrefixClasses, prefix_classes
from mmserve.constraint.search.shortest_completion import Effort, find_completion
from mmserve.constraint.search.vocabulary import Lexicon, Vocabulary
from mmserve.constraint.search.witness import Infeasible, admit
from mmserve.core.constraint import Choice, JsonSchema, Lark, Regex

TAILS = ['"', "0", "}", "]", ",", "a", 'b",', "00", "1.5", 'é"', '":', '"}', "\\n", "xxx", "0000", ""]


def prefixes(classes: PrefixClasses, said: bytes, by_kind: dict[Hashable, list[bytes]]) -> None:
    prefix_class = classes.start()
    for i in range(len(said) + 1):
        by_kind[prefix_class].append(said[:i])
        prefix_class = classes.after(prefix_class, said[i : i + 1])


def what_follows(at: Any, text: bytes) -> tuple[Any, ...]:
    fork = at.deep_copy()
    taken = fork.try_consume_tokens(list(text))
    if taken < len(text) or fork.is_stopped():
        return taken < len(text), fork.is_stopped()
    return fork.is_accepting(), fork.compute_bitmask()


def alike_go_on_alike(schemas: list[Schema], seed: int) -> int:
    """How many pairs of different texts of one class were compared."""
    chance, pairs = random.Random(seed), 0
    for schema in schemas:
        try:
            at = schema_matcher(schema)
        except Refused:
            continue
        classes = prefix_classes(grammar(JsonSchema(json.dumps(schema))).text)
        assert classes.known
        by_kind: dict[Hashable, list[bytes]] = defaultdict(list)
        for _ in range(10):
            if (said := sentence(at, chance)) is not None:
                prefixes(classes, said.encode(), by_kind)
        for texts in by_kind.values():
            some = chance.sample(sorted(set(texts)), min(3, len(set(texts))))
            for one, other in itertools.combinations(some, 2):
                pairs += 1
                for tail in ("", *chance.sample(TAILS, 4)):
                    ends = [what_follows(at, text + tail.encode()) for text in (one, other)]
                    assert ends[0] == ends[1], (schema, one, other, tail)
    return pairs


def test_texts_of_one_class_are_followed_by_the_same() -> None:
    assert alike_go_on_alike(random.Random(3).sample(zoo(400), 20), 0) > 200


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_texts_of_one_class_are_followed_by_the_same_in_all_schemas() -> None:
    assert sum(alike_go_on_alike(zoo(400), seed) for seed in (1, 2, 3)) > 20_000


PIECES = ['"', '""', '"a', 'a"', "a", "b", "aa", "bab", "aaa", '":', '":"', '","', "{", '{"', "}", '"}', "[", "]", ","]
PIECES += [":", "0", "1", "12", "-", ".", "5", "null", "é", "\\", "n", "abab", "1-", "-1", "2:3", "-0", "4-1"]
#: Few enough for brute force over two strings.
FEW = ['"', 'a"', "a", "aa", "bab", '":', '","', '{"', '"}', "[", "]", ",", "b"]
LENGTHS = {"type": "string", "minLength": 5}
CLOSED: list[Schema] = [
    {"type": "string"},
    LENGTHS,
    {"type": "string", "minLength": 7, "maxLength": 8},
    {"type": "string", "pattern": "^(ab)+a$", "minLength": 4},
    {"type": "string", "pattern": "b.{2}b"},
    {"type": "string", "pattern": "^[ab]{3}-[0-9]{2}$"},
    {"type": "string", "not": {"enum": ["", "a", "b", "aa"]}},
    {"type": "string", "minLength": 2, "allOf": [{"pattern": "é$"}]},
    {"type": "integer", "minimum": 101, "maximum": 5000},
    {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": -1.05},
    {"type": "integer", "multipleOf": 7, "minimum": 200},
    of("b", b={"type": "string", "minLength": 2}),
    of("a", a={"type": "string", "pattern": "^bab.a{2,}$"}),
    {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 2},
    {"anyOf": [of("a", a=LENGTHS), {"type": "array", "items": {"const": "ba"}, "minItems": 2}]},
]


def vocabulary(pieces: list[str]) -> tuple[Vocabulary, Lexicon]:
    spelled = Vocabulary.spelled([*(piece.encode() for piece in pieces), b""], {len(pieces)})
    return spelled, Lexicon.of(spelled.token_bytes)


def brute_force(grammar: Grammar, pieces: list[str]) -> int:
    """Fewest pieces that make a sentence: every text that can be gone on with is, and none is left out."""
    level, depth = {b"": grammar.start()}, 0
    while not any(at.accepting for at in level.values()):
        following = {}
        for text, at in level.items():
            for token, piece in enumerate(pieces):
                grown = text + piece.encode()
                if grown not in following and at.valid([token]):
                    following[grown] = at.fork()
                    following[grown].consume([token])
        level, depth = following, depth + 1
        assert level and len(level) < 100_000
    return depth


@pytest.mark.parametrize("n", range(len(CLOSED)))
def test_the_least_number_of_tokens_is_exact(n: int) -> None:
    pieces = FEW if "string" in str(CLOSED[n]) and CLOSED[n].get("type") != "string" else PIECES
    spelled, lexicon = vocabulary(pieces)
    made = Grammar(grammar(JsonSchema(json.dumps(CLOSED[n]))).text, spelled)
    close = find_completion(made.start(), lexicon, classes=made.classes)
    assert close is not None and close.exact
    assert completes(made.start(), close.tokens)
    assert jsonschema_rs.is_valid(CLOSED[n], json.loads(lexicon.text(close.tokens)))
    assert len(close.tokens) == brute_force(made, pieces)
    with pytest.raises(Infeasible) as refused:
        admit(made, lexicon, len(close.tokens) - 1)
    assert refused.value.exact and refused.value.needed == len(close.tokens)
    assert admit(made, lexicon, len(close.tokens)).length == len(close.tokens)


@pytest.mark.parametrize("pattern", ["[ab]{9}", "(a|bab)*é(b|aa){3}", "^a.*b.{3}$", "[^a]{3,}a{3}"])
def test_the_least_number_of_tokens_of_an_expression_is_exact(pattern: str) -> None:
    spelled, lexicon = vocabulary(PIECES)
    made = Grammar(grammar(Regex(pattern)).text, spelled)
    close = find_completion(made.start(), lexicon, Effort(exact_tokens=0), classes=made.classes)
    assert close is not None and close.exact
    assert re.fullmatch(pattern, lexicon.text(close.tokens).decode())
    assert len(close.tokens) == brute_force(made, PIECES)


def test_only_what_is_understood_has_classes() -> None:
    assert prefix_classes(grammar(Choice(("ab", "é"))).text).known
    assert not prefix_classes(grammar(Lark('start: "a" start | "b"')).text).known
    assert not prefix_classes(grammar(Regex("[ab]c" * 3_000)).text).known, "too long to go through"


def test_what_cannot_be_searched_has_a_bound_that_is_enough() -> None:
    spelled, lexicon = vocabulary(PIECES)
    made = Grammar(grammar(JsonSchema(json.dumps(CLOSED[1]))).text, spelled)
    hasty = Effort(exact_tokens=5, patient_tokens=5)
    close, exact = (find_completion(made.start(), lexicon, e, classes=made.classes) for e in (hasty, Effort()))
    assert close is not None and exact is not None
    assert not close.exact and completes(made.start(), close.tokens)
    assert len(close.tokens) >= len(exact.tokens)


def test_ways_that_multiply_end_the_search_and_nothing_else() -> None:
    """A pattern with too many partial derivatives: the bound by bytes stands."""
    spelled, lexicon = vocabulary(PIECES)
    made = Grammar(grammar(Regex("(a|b)*" + "(a|b)?" * 80 + "a{3}")).text, spelled)
    with pytest.raises(BadPattern):
        made.classes().after(made.classes().start(), b"a")
    close = find_completion(made.start(), lexicon, Effort(exact_tokens=0), classes=made.classes)
    assert close is not None and completes(made.start(), close.tokens)
