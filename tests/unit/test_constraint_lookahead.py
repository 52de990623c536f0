"""What a state is said to need is never more than it does, mostly no less, and a search makes use of it."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from grammars import grammar

from mmserve.constraint.search import feasibility
from mmserve.constraint.search.beam import Beam
from mmserve.constraint.search.feasibility import LookaheadBound, SearchTimeout, look_ahead
from mmserve.constraint.search.lattice import TopK
from mmserve.constraint.search.matcher import Grammar
from mmserve.constraint.search.parser_states import ParserState, ParserStateCache
from mmserve.constraint.search.prefix_equivalence import prefix_classes
from mmserve.constraint.search.shortest_completion import find_completion
from mmserve.constraint.search.vocabulary import Lexicon, Vocabulary
from mmserve.constraint.search.witness import Outcome, Witness, advance, improve, start_witness
from mmserve.core.constraint import JsonSchema

Schema = dict[str, Any]

BYTES = [chr(i) for i in range(0x20, 0x7F)]
#: What merges make of JSON, with ends of strings and numbers in the middle of tokens, and of what may stand in it.
MERGED = ['{"', '"}', '":', '":"', '","', ',"', '"},{"', "},{", '["', '"]', '": ', ', "', 'a"', 'b",', "0,", "1}"]
MERGED += ["12]", "name", "true", "false", "null", "red", "ab", "abc", '"a', '"ab', '"x"', "é", "\n"]
MERGED += map(str, range(10, 100))
PIECES = [*BYTES, *MERGED]
END = len(PIECES)


def of(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT, WHOLE = {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": 0, "maximum": 150}
PERSON = of(name=TEXT, age=WHOLE, married={"type": "boolean"})
SCHEMAS: list[Schema] = [
    PERSON,
    of(prefix_class={"enum": ["circle", "square"]}, at=of(row=WHOLE, column=WHOLE)),
    of(items={"type": "array", "items": of(name=TEXT, count=WHOLE), "minItems": 2, "maxItems": 4}, paid=TEXT),
    of(celsius={"type": "number", "minimum": -90, "maximum": 60}, step={"type": "integer", "minimum": 120}),
    of(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, note={"type": "string", "minLength": 3}),
    of(at={"anyOf": [of(x=WHOLE), of(y=TEXT, z=WHOLE)]}, rest={"type": ["null", "string"]}),
    {"type": "object", "additionalProperties": WHOLE, "minProperties": 1},
    {"type": "array", "items": {"type": "integer"}, "minItems": 3},
]
#: Of these, nothing is left out of what a state needs.
EXACT = SCHEMAS[:3]


def language() -> tuple[Vocabulary, Lexicon]:
    vocabulary = Vocabulary.spelled([*(piece.encode() for piece in PIECES), b""], {END})
    return vocabulary, Lexicon.of(vocabulary.token_bytes)


VOCABULARY, LEXICON = language()


def made(schema: Schema) -> Grammar:
    return Grammar(grammar(JsonSchema(json.dumps(schema))).text, VOCABULARY)


def fresh(constraint: Grammar) -> tuple[ParserStateCache, ParserState]:
    states = ParserStateCache(LEXICON, constraint.classes)
    return states, states.locate((), constraint.start)


def always() -> bool:
    return True


def answer(constraint: Grammar, chance: random.Random) -> list[int] | None:
    """Any answer, by tokens at random; ends are liked more, so that it comes to one."""
    at, tokens = constraint.start(), list[int]()
    while not at.accepting or chance.random() < 0.3:
        allowed = at.allowed().tolist()
        closing = [token for token in allowed if set(PIECES[token]) & set('"}]')]
        if not allowed or len(tokens) > 120:
            return tokens if at.accepting else None
        tokens.append(chance.choice(closing if closing and chance.random() < 0.4 else allowed))
        at.consume(tokens[-1:])
    return tokens


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_no_answer_takes_fewer_tokens_than_a_place_on_its_way_is_said_to_need(schema: Schema) -> None:
    constraint, chance, compared = made(schema), random.Random(1), 0
    states, root = fresh(constraint)
    measured = LookaheadBound(root, 60, states, always)
    for _ in range(40):
        tokens = answer(constraint, chance)
        if tokens is None or len(tokens) > 60:
            continue
        at: ParserState | None = root
        for i, token in enumerate(tokens):
            assert at is not None
            assert measured.least(at) <= len(tokens) - i, tokens[:i]
            assert measured.fits(at, i)
            at = states.after(at, token)
            compared += 1
        assert at is not None and measured.least(at) == 0
    assert compared > 100


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_the_start_needs_what_the_shortest_answer_takes(schema: Schema) -> None:
    constraint = made(schema)
    states, root = fresh(constraint)
    shortest = find_completion(constraint.start(), LEXICON, classes=constraint.classes, room=40)
    assert shortest is not None
    least = LookaheadBound(root, 60, states, always).least(root)
    assert least == len(shortest.tokens) if schema in EXACT else 1 < least <= len(shortest.tokens)


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_tokens_left_out_where_there_are_many_make_no_difference(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that lead where a shorter one leads: numbers of two digits, and quotes with letters after them."""
    constraint = made(schema)

    def needed(wide: int) -> int:
        monkeypatch.setattr(feasibility, "_MAX_BRANCHES", wide)
        states, root = fresh(constraint)
        return LookaheadBound(root, 60, states, always).least(root)

    assert needed(len(PIECES)) >= needed(64) >= needed(16) >= needed(0) == 1
    if schema in EXACT:
        assert needed(len(PIECES)) == needed(24)


def test_texts_that_differ_in_spaces_alone_are_alike_behind_them() -> None:
    classes = prefix_classes(made(of(a=WHOLE, b={"type": "array", "items": TEXT})).source)

    def prefix_class(text: str) -> Any:
        return classes.after(classes.start(), text.encode())

    assert prefix_class('{"a": 1, "b"') == prefix_class('{"a":1, "b"') == prefix_class('{"a":1,"b"')
    assert prefix_class('{"a": 1, "b": ["x", "y') == prefix_class('{"a":1,"b":["x","y')
    assert prefix_class('{"a": ') != prefix_class('{"a":')  # another space may follow one of them only
    assert prefix_class('{"a":1, ') != prefix_class('{"a":1,')


def lost(positions: np.ndarray, chance: random.Random) -> TopK:
    """What a model says that has lost its way: ends of text, and signs at random."""
    tokens = np.array([[END, *chance.sample(range(len(PIECES)), 7)] for _ in positions], np.int64)
    return TopK(positions, tokens, np.log(np.tile([0.9, *[0.1 / 7] * 7], (len(positions), 1))).astype(np.float32))


def cramped(spare: int) -> tuple[Witness, np.ndarray]:
    """The first witness of a person, and a canvas that is committed to end ``spare`` tokens after it."""
    constraint = made(PERSON)
    close = find_completion(constraint.start(), LEXICON, classes=constraint.classes, room=40)
    witness = start_witness(constraint, 40, close, ParserStateCache(LEXICON, constraint.classes))
    known = np.full(40, -1, np.int64)
    known[witness.length + spare :] = END
    return advance(witness, known), known


def decoded(spare: int, beam: Beam, seed: int) -> tuple[list[Outcome], str]:
    """Outcomes of steps that commit a position each, from the left, and the answer."""
    witness, known = cramped(spare)
    chance, outcomes = random.Random(seed), list[Outcome]()
    while (known < 0).any():
        top = lost(np.flatnonzero(known < 0), chance)
        witness, outcome = improve(witness, known, top, 40, LEXICON, beam=beam, seconds=60)
        outcomes.append(outcome)
        at = int(np.flatnonzero(known < 0)[0])
        known[at] = witness.tokens[at]
        witness = advance(witness, known)
    return outcomes, LEXICON.text(known[: witness.length].tolist()).decode()


def test_where_no_room_is_left_a_search_knows_what_it_can_not_do() -> None:
    kept = {True: 0, False: 0}
    for seed in range(2):
        for asked in kept:
            outcomes, text = decoded(0, Beam() if asked else Beam(spare=-1), seed)
            kept[asked] += sum(outcome is Outcome.KEPT for outcome in outcomes)
            person = json.loads(text)
            assert list(person) == ["name", "age", "married"] and 0 <= person["age"] <= 150
    assert kept[True] == 0 < kept[False]


def test_what_is_found_does_not_depend_on_a_look_ahead() -> None:
    def found(*, ahead: bool) -> list[list[int]]:
        witness, known = cramped(1)
        states = ParserStateCache(LEXICON, witness.classes)
        if ahead:
            look_ahead(made(PERSON), witness.tokens[:1].tolist(), 30, states)
            assert states.explored
        chance, tokens = random.Random(5), list[list[int]]()
        for _ in range(4):
            top = lost(np.flatnonzero(known < 0), chance)
            witness, _ = improve(witness, known, top, 40, LEXICON, states=states, seconds=60)
            tokens.append(witness.tokens.tolist())
        return tokens

    assert found(ahead=True) == found(ahead=False)


def test_what_places_need_is_not_asked_when_time_is_over() -> None:
    states, root = fresh(made(PERSON))
    with pytest.raises(SearchTimeout):
        LookaheadBound(root, 60, states, lambda: False)
