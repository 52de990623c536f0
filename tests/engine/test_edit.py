"""Editing: committed tokens are replaced only where the policy says so, and text is final only once its block is."""

from __future__ import annotations

import numpy as np
import pytest
from harness import Bench
from helpers import ask, blank, proposal, tiny_model

from mmserve.core.request import Policy
from mmserve.decode.commit.edit import Edit


def edit(**options: float) -> Policy:
    return Policy(name="edit", options=options)


@pytest.mark.parametrize("block", [4, 16])
def test_tokens_are_replaced_and_announced_and_text_is_never_taken_back(bench, block: int) -> None:
    b: Bench = bench(tiny_model(vision=False), watch=False)
    call = b.submit(
        ask("e", max_new_tokens=16, block=block, commit=edit(confidence=0.05, edit_confidence=0.05), snapshots=True)
    )[0]
    done = call.finished()
    assert done.edits == sum(s.edited for s in call.snapshots) > 0, "a random model changes its mind"
    assert "".join(call.deltas) == done.text
    assert call.snapshots[-1].committed == 16
    b.await_nothing_left()


def test_without_anything_to_replace_it_is_threshold_and_one_pass_a_block_more(bench) -> None:
    b: Bench = bench(tiny_model(vision=False), watch=False)
    plain = b.ask(ask("t", max_new_tokens=16, block=8, commit=Policy(name="threshold", options={"confidence": 2.0})))
    edited = b.ask(ask("e", max_new_tokens=16, block=8, commit=edit(confidence=2.0, edit_confidence=2.0)))
    assert edited.text == plain.text and edited.edits == 0
    assert edited.forwards == plain.forwards + 2
    none = b.ask(ask("n", max_new_tokens=16, block=8, commit=edit(confidence=2.0, edit_confidence=2.0, passes=0)))
    assert none.text == plain.text and none.forwards == plain.forwards


def test_a_full_block_is_run_at_most_so_many_times_more(bench) -> None:
    b: Bench = bench(tiny_model(vision=False), watch=False)
    for passes in (0, 1, 3):
        policy = edit(confidence=0.0001, edit_confidence=0.0001, passes=passes)
        done = b.ask(ask(f"p{passes}", max_new_tokens=12, block=12, commit=policy))
        assert done.forwards <= 1 + passes


def test_an_answer_is_the_same_among_strangers(bench) -> None:
    def requests() -> list:
        return [
            ask(
                f"r{i}",
                f"what is left of {i}?",
                max_new_tokens=(9, 16, 21)[i % 3],
                block=(4, 8)[i % 2],
                commit=edit(confidence=0.1, edit_confidence=0.1) if i % 3 else None,
                recompute=Policy(name=("none", "dual", "dkv_decode")[i % 3]),
            )
            for i in range(12)
        ]

    alone: Bench = bench(tiny_model(vision=False), stages="inline", watch=False)
    expected = {r.id: (f.text, f.forwards, f.edits) for r in requests() for f in [alone.ask(r)]}
    together: Bench = bench(tiny_model(vision=False), watch=False)
    calls = together.submit(*reversed(requests()))
    assert {c.request.id: (c.finished().text, c.finished().forwards, c.finished().edits) for c in calls} == expected


def test_the_rule() -> None:
    canvas = blank(2, 8, 4)
    policy = Edit(confidence=0.8, edit_confidence=0.6, passes=2)
    positions = canvas.block()

    def choose(confidence: list[float], tokens: list[int]) -> list[bool]:
        given = proposal(canvas, np.array(confidence), np.array(tokens), positions=positions)
        return policy.choose(canvas, given).tolist()

    assert choose([0.1, 0.3, 0.2, 0.0], [7, 7, 7, 7]) == [False, True, False, False]  # at least the best
    canvas.count_forward()
    canvas.commit(np.array([2, 3]), np.array([5, 6]), hold=True)
    assert choose([0.9, 0.7, 0.81, 0.8], [5, 9, 7, 7]) == [False, True, True, False]  # the same token is no edit
    assert choose([0.6, 0.6, 0.1, 0.2], [9, 9, 7, 7]) == [False, False, False, True]  # not above the threshold
    canvas.commit(np.array([4, 5]), np.array([5, 6]), hold=True)
    assert canvas.block_start == 2 and not policy.is_final(canvas, 0), "a full block is run once more"
    canvas.count_forward()
    assert canvas.full_passes == 1 and policy.is_final(canvas, 0) and not policy.is_final(canvas, 1)
    canvas.edit(np.array([3]), np.array([9]))
    canvas.count_forward()
    assert policy.is_final(canvas, 1), "after so many passes it is final"
    canvas.advance()
    assert (canvas.block_start, canvas.full_passes) == (6, 0)
    with pytest.raises(ValueError, match="current block"):
        canvas.edit(np.array([3]), np.array([1]))
    with pytest.raises(ValueError, match="current block"):
        canvas.edit(np.array([7]), np.array([1]))


@pytest.mark.parametrize("recompute", ["none", "dual", "dkv_decode", "adaptive"])
def test_a_block_is_final_only_after_all_of_it_was_judged(bench, recompute: str, monkeypatch) -> None:
    b: Bench = bench(tiny_model(vision=False), watch=False)
    seen: list[int] = []
    real = Edit.is_final

    def is_final(self, canvas, edited):
        final = real(self, canvas, edited)
        if final and not len(canvas.block_masked()):
            seen.append(edited)
        return final

    judged: list[tuple[int, int]] = []
    choose = Edit.choose

    def chosen(self, canvas, candidates):
        judged.append((len(candidates.positions), canvas.block_end - canvas.block_start))
        return choose(self, canvas, candidates)

    monkeypatch.setattr(Edit, "is_final", is_final)
    monkeypatch.setattr(Edit, "choose", chosen)
    b.ask(ask("e", max_new_tokens=16, block=8, commit=edit(confidence=0.3), recompute=Policy(name=recompute)))
    assert seen and all(asked == size for asked, size in judged)


def test_numbers_past_fp32_are_like_any_above_one() -> None:
    canvas = blank(2, 3, 3)
    chosen = Edit(confidence=1e300, edit_confidence=1e300).choose(canvas, proposal(canvas))
    assert chosen.tolist() == [False, False, True]


@pytest.mark.parametrize("numbers", [{"confidence": 0}, {"edit_confidence": -1}, {"passes": -1}, {"passes": 65}])
def test_numbers_that_make_no_sense_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Edit(**numbers)
