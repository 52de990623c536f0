"""What is known of each position of an answer, step by step, and the alternatives that are noted from logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import blank, proposal

from mmserve.core.candidates import Alternatives
from mmserve.core.canvas import GIVEN
from mmserve.core.canvas_record import STATES, CanvasRecord
from mmserve.core.events import Draft, DraftAlternative, DraftPosition
from mmserve.core.request import Sampling
from mmserve.decode.alternatives import RecordingLogits, alternatives

NONE: frozenset[int] = frozenset()


def states(record: CanvasRecord) -> list[str]:
    return [STATES[state] for state in record.states]


def test_a_position_goes_from_masked_to_draft_to_committed_to_edited() -> None:
    canvas, record = blank(3, 6, 3), CanvasRecord.nothing(6, 0)
    logs = np.zeros(9, np.float32)
    canvas.count_forward()
    canvas.commit(np.array([4]), np.array([11]), hold=True)
    logs[4] = np.log(0.25)
    first = proposal(canvas, np.array([0.5, 0.75]), np.array([10, 12]), positions=np.array([3, 5]))
    assert record.take(canvas, first, logs, NONE).tolist() == [0, 1, 2, 3, 4, 5], "all of them at first"
    assert states(record) == ["draft", "committed", "draft", "masked", "masked", "masked"]
    assert record.tokens.tolist() == [10, 11, 12, 0, 0, 0]
    assert record.confidence.tolist() == pytest.approx([0.5, 0.25, 0.75, 0, 0, 0])

    canvas.count_forward()
    same = proposal(canvas, np.array([0.501, 0.76]), np.array([10, 12]), positions=np.array([3, 5]))
    assert record.take(canvas, same, logs, NONE).tolist() == [2], "one changed by no more than nobody sees"

    canvas.count_forward()
    canvas.edit(np.array([4]), np.array([21]))
    other = proposal(canvas, np.array([0.5, 0.76]), np.array([13, 12]), positions=np.array([3, 5]))
    assert record.take(canvas, other, logs, NONE).tolist() == [0, 1]
    assert states(record)[:2] == ["draft", "edited"] and record.tokens[1] == 21

    canvas.count_forward()
    nothing = proposal(canvas, np.zeros(0), np.zeros(0, np.int64), positions=np.zeros(0, np.int64))
    assert record.take(canvas, nothing, logs, NONE).tolist() == [] and states(record)[1] == "edited"


def test_small_changes_of_a_probability_add_up_until_they_are_sent() -> None:
    canvas, record, logs = blank(3, 2, 2), CanvasRecord.nothing(2, 0), np.zeros(5, np.float32)
    changed = []
    for step in range(11):
        canvas.count_forward()
        slowly = proposal(canvas, np.array([0.5 + 0.002 * step, 0.5]), np.array([10, 12]))
        changed.append(record.take(canvas, slowly, logs, NONE).tolist())
    assert changed == [[0, 1], [], [], [0], [], [], [0], [], [], [0], []]
    assert record.confidence.tolist() == pytest.approx([0.518, 0.5]), "as last sent"


def test_probabilities_of_alternatives_are_sent_as_often_as_those_of_tokens() -> None:
    canvas, record, logs = blank(1, 2, 2), CanvasRecord.nothing(2, 2), np.zeros(3, np.float32)

    def taken(second: float) -> list[int]:
        canvas.count_forward()
        found = Alternatives(np.array([[5, 8], [6, 9]]), np.log(np.array([[0.5, second], [0.5, 0.3]], np.float32)))
        both = proposal(canvas, np.array([0.5, 0.5]), np.array([5, 6]), positions=np.array([1, 2]))
        return record.take(canvas, replace(both, alternatives=found), logs, NONE).tolist()

    assert [taken(0.3 + 0.002 * step) for step in range(7)] == [[0, 1], [], [], [0], [], [], [0]]
    assert record.alternatives.log_probabilities[0, 1] == pytest.approx(np.log(0.312))
    assert [taken(second) for second in (0.002, 0.003, 0.001)] == [[0], [], []], "too small to be sent"


def test_given_text_is_pinned_and_padding_is_not() -> None:
    canvas, record = blank(2, 4, 4), CanvasRecord.nothing(4, 0)
    canvas.commit(np.array([2, 5]), np.array([7, 9]), hold=True)
    assert canvas.committed_at[[2, 5]].tolist() == [GIVEN, GIVEN]
    canvas.count_forward()
    record.take(canvas, proposal(canvas), np.zeros(6, np.float32), frozenset({9}))
    assert states(record) == ["pinned", "draft", "draft", "committed"]


def test_a_final_token_keeps_the_alternatives_of_its_own_step() -> None:
    canvas, record = blank(1, 2, 2), CanvasRecord.nothing(2, 2)
    logs = np.zeros(3, np.float32)

    def judged(tokens: list[list[int]]) -> Any:
        found = Alternatives(np.array(tokens), np.log(np.full((2, 2), 0.5, np.float32)))
        both = proposal(canvas, np.array([0.5, 0.5]), np.array([5, 6]), positions=np.array([1, 2]))
        return replace(both, alternatives=found)

    canvas.count_forward()
    step = judged([[5, 8], [6, 9]])
    canvas.commit(np.array([1]), np.array([5]), hold=True)
    record.take(canvas, step, logs, NONE)
    canvas.count_forward()
    assert record.take(canvas, judged([[1, 2], [3, 4]]), logs, NONE).tolist() == [1]
    assert record.alternatives.tokens.tolist() == [[5, 8], [3, 4]]


def softmax(row: list[float], left_out: set[int]) -> dict[int, float]:
    """In double precision, written out; tokens that are left out have no probability."""
    powers = {i: np.exp(np.float64(x)) for i, x in enumerate(row) if i not in left_out}
    whole = sum(powers.values())
    return {i: float(np.log(p / whole)) for i, p in powers.items()}


@pytest.mark.parametrize("mask_id", [None, 3])
def test_alternatives_are_the_largest_of_the_softmax(mask_id: int | None) -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    tokens, logs = alternatives(logits, 4, (3, 6), mask_id)
    for row, mine, said in zip(logits.tolist(), tokens.tolist(), logs.tolist(), strict=True):
        told = softmax(row, {6} if mask_id is not None else {3, 6})
        told.pop(3, None)
        best = sorted(told, key=lambda i: -told[i])[:4]
        assert mine == best and said == pytest.approx([told[i] for i in best], abs=1e-5)


def test_where_there_are_fewer_tokens_than_asked_for_the_rest_is_none() -> None:
    tokens, logs = alternatives(torch.zeros(2, 3), 5, (1,), None)
    assert tokens.shape == logs.shape == (2, 5)
    assert np.isfinite(logs).sum(-1).tolist() == [2, 2]


class Rows:
    """Logits that are there, two rows at a time."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def only(self, rows: np.ndarray) -> Rows:
        return Rows(self.logits[torch.from_numpy(rows)])

    def slices(self) -> Any:
        yield from self.logits.clone().split(2)

    def whole(self) -> torch.Tensor:
        return self.logits.clone()


def test_noting_changes_nothing_of_what_is_read() -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    positions = np.array([4, 5, 6, 8, 9])
    expected = alternatives(logits, 3, (), None)

    def noting() -> RecordingLogits:
        return RecordingLogits(Rows(logits), positions, blank(4, 6, 6), Sampling(), 3, (), None)

    whole = noting()
    assert torch.equal(whole.whole(), logits) and (whole.of(positions).tokens == expected[0]).all()
    parted = noting()
    for part in parted.slices():
        part.fill_(0)  # readers may change it at will
    assert (parted.of(positions).tokens == expected[0]).all()
    some = noting()
    list(some.only(np.array([1, 3])).slices())
    found = some.of(np.array([5, 7, 8, 9]))
    assert (found.tokens[[0, 2]] == expected[0][[1, 3]]).all()
    assert np.isneginf(found.log_probabilities[[1, 3]]).all(), "one is no position of the pass, one was not read"


def test_biases_and_penalties_are_part_of_alternatives() -> None:
    logits = torch.zeros(1, 8)
    rows = RecordingLogits(Rows(logits), np.array([4]), blank(4, 6, 6), Sampling(logit_bias={5: 3.0}), 2, (), None)
    list(rows.slices())
    found = rows.of(np.array([4]))
    assert found.tokens[0, 0] == 5
    assert found.log_probabilities[0, 0] == pytest.approx(3 - np.log(7 + np.exp(3)), abs=1e-5)


def test_a_draft_after_another_has_the_newer_of_each_position() -> None:
    def draft(forwards: int, *at: tuple[int, str]) -> Draft:
        return Draft(tuple((i, 1, text, "draft", 0.5, ((1, text, 0.5),)) for i, text in at), 4, forwards)

    both = draft(2, (1, "b"), (3, "d")).after(draft(1, (0, "a"), (1, "x")))
    assert both == draft(2, (0, "a"), (1, "b"), (3, "d"))
    assert both.positions[1] == DraftPosition(1, 1, "b", "draft", 0.5, (DraftAlternative(1, "b", 0.5),))
