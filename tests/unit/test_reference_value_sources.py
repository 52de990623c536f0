"""The tokens of a question that the arguments of a call are copied from."""

import json
import random

import helpers
import pytest

from mmserve.reference.batch import NO_COLUMN
from mmserve.reference.calls import CALLS
from mmserve.reference.copying import Guide
from mmserve.reference.data import collate
from mmserve.reference.items import Question
from mmserve.reference.value_sources import value_spans
from mmserve.tools.formats import HERMES
from mmserve.tools.parse import written


def answer_of(*calls):
    return written(HERMES, ((name, json.dumps(arguments)) for name, arguments in calls))


@pytest.mark.parametrize(
    ("text", "calls", "expected"),
    [
        ("Draw a red square in 3 s.", [("draw", {"color": "red", "seconds": 3})], {("red", 7), ("3", 21)}),
        ("Use C in Cairo.", [("weather", {"unit": "C", "city": "Cairo"})], {("C", 4), ("Cairo", 9)}),
        ("5 plus 5", [("add", {"a": 5, "b": 5})], {("5", 0), ("5", 7)}),
        ("large red, large blue", [("f", {"s": "large"}), ("f", {"s": "large"})], {("large", 0), ("large", 11)}),
        ("red or red", [("f", {"s": "red"})], set()),
        ("a b", [("f", {"s": "c"})], set()),
        ("no call at all", [], set()),
    ],
)
def test_values_are_found_in_the_question(text, calls, expected):
    answer = answer_of(*calls) if calls else "There is no tool for that."
    spans = value_spans(Question("call", text, answer))
    assert {(text[by : by + length], by) for _to, by, length in spans} == expected
    assert all(answer[to : to + length] == text[by : by + length] for to, by, length in spans)
    assert len({to for to, _by, _length in spans}) == len(expected)


@pytest.mark.parametrize("task", ["call", "two_calls", "no_call", "result"])
def test_columns_of_a_batch_have_the_characters_of_the_answer(task):
    tokenizer = helpers.tokenizer()
    samples = []
    for seed in range(6):
        thing, question = CALLS.sample(task, random.Random(seed))
        samples.append((thing, [question]))
    batch = collate("calls", samples, 0, tokenizer)
    assert batch.sources is not None and batch.sources.shape == batch.ids.shape
    guided = Guide.of(batch).source
    for ids, sources, share, source, (_thing, [question]) in zip(
        batch.ids, batch.sources, batch.share, guided, samples, strict=True
    ):
        found = [(to, by) for to, by in enumerate(sources.tolist()) if by != NO_COLUMN]
        assert bool(found) == bool(value_spans(question))
        before, ends = NO_COLUMN, 0
        for to, by in found:
            own, copied = tokenizer.decode([int(ids[to])]).strip(), tokenizer.decode([int(ids[by])]).strip()
            if own[0] in '",}':  # the value has ended
                assert 0 <= by - before <= 1
                ends += 1
            else:
                assert own == copied or own.startswith(copied) or copied.startswith(own)
            before = by
            assert share[to] > 0 == share[by] and source[to] == by
        assert ends == len(value_spans(question))
