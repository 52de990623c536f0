"""The learned policy through the real engine: beside the baseline, closed at an end of text, alone and in a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import Bench
from helpers import ask, dkv, sure_above

from mmserve.core.request import Policy, Request
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.models.base import LoadedModel

Make = Callable[..., Bench]
NEW = 24


def learned(**options: float) -> Policy:
    return Policy(name="learned", options=options)


def asked(name: str, commit: Policy | None = None, **options: object) -> Request:
    return ask(name, f"shape {name[-1]}", commit=commit, **{"max_new_tokens": NEW, "block": 8, **options})


@pytest.fixture(scope="module")
def filtered(model: LoadedModel) -> LoadedModel:
    """The tiny model with a filter; no token ends its answers."""
    spec = dataclasses.replace(model.spec, end_ids=frozenset({model.spec.mask_id}))
    return dataclasses.replace(model, spec=spec, commit_filter=sure_above(0.4))


def ending(filtered: LoadedModel, tokens: np.ndarray) -> LoadedModel:
    """The same model, whose answers end with the commonest of ``tokens``."""
    end = int(np.bincount(tokens).argmax())
    padding = int(tokens[tokens != end][0])
    return dataclasses.replace(
        filtered, spec=dataclasses.replace(filtered.spec, end_ids=frozenset({end, padding}), padding_id=padding)
    )


def test_nothing_trusted_is_the_baseline(bench: Make, filtered: LoadedModel) -> None:
    b = bench(filtered, stages="inline")
    for steps in (0, 9):
        plain = b.ask(asked("a1", steps=steps))
        same = b.ask(asked("b1", learned(threshold=1.5, end_of_text=False), steps=steps))
        assert (same.text, same.forwards) == (plain.text, plain.forwards)
        for mine, other in zip(b.canvases["a1"], b.canvases["b1"], strict=True):
            assert np.array_equal(mine, other)
        b.canvases.clear()


def test_what_is_trusted_saves_passes(bench: Make, filtered: LoadedModel) -> None:
    b = bench(filtered, stages="inline")
    plain, fast = b.ask(asked("a1")), b.ask(asked("b1", learned()))
    assert plain.forwards == NEW and fast.forwards < NEW
    assert np.bincount(b.canvases["b1"][1][-NEW:]).max() > 1


def test_an_accepted_end_settles_all_to_its_right(bench: Make, filtered: LoadedModel) -> None:
    b = bench(filtered, stages="inline")
    b.ask(asked("a1", learned()))
    model = ending(filtered, b.canvases["a1"][0][-NEW:])
    b = bench(model, stages="inline")
    done = b.ask(asked("b1", learned(), snapshots=True))
    tokens, at = (x[-NEW:] for x in b.canvases["b1"])
    ends = np.flatnonzero(np.isin(tokens, list(model.spec.end_ids)))
    first = ends[0]
    assert done.reason == "end" and done.usage.completion_tokens == first < NEW - 1
    assert (at <= done.forwards).all()  # nothing is left open
    accepted = ends[at[ends] == at[ends].min()][0]
    assert (at[accepted:] <= at[accepted]).all()
    filled = np.arange(NEW) > accepted
    assert (tokens[filled & (at == at[accepted])] == model.spec.padding_id).all()
    assert filled.any()


def test_an_end_changes_nothing_that_is_final_and_leaves_what_is_left_of_it_open(
    bench: Make, filtered: LoadedModel
) -> None:
    """What is still open left of an end sees padding instead of masks from then on, and may become other tokens."""
    b = bench(filtered, stages="inline")
    b.ask(asked("a1", learned()))
    model = ending(filtered, b.canvases["a1"][0][-NEW:])
    b = bench(model, stages="inline")  # watches that what is final stays
    commit, open_left, final_right = b.engine.stages.decoder.commit, 0, 0

    def looked(d: Any) -> Any:
        nonlocal open_left, final_right
        was_open, tokens = d.canvas.masked.copy(), d.canvas.tokens.copy()
        outcome = commit(d)
        new = np.flatnonzero(was_open & ~d.canvas.masked)
        ends = new[np.isin(d.canvas.tokens[new], list(model.spec.end_ids))]
        assert np.array_equal(d.canvas.tokens[~was_open], tokens[~was_open])
        if len(ends):
            assert not d.canvas.masked[ends[0] :].any()
            open_left += int(d.canvas.masked[: ends[0]].sum())
            final_right += int((~was_open[ends[0] :]).sum())
        return outcome

    b.engine.stages.decoder.commit = looked
    for seed in range(8):
        done = b.ask(asked(f"s{seed}", learned(threshold=2.0), temperature=1.0, seed=seed))
        assert done.edits == 0
    assert open_left and final_right, "an end is accepted between open and final positions"


def test_without_it_what_is_right_of_an_end_stays_open(bench: Make, filtered: LoadedModel) -> None:
    b = bench(filtered, stages="inline")
    b.ask(asked("a1", learned()))
    model = ending(filtered, b.canvases["a1"][0][-NEW:])
    b = bench(model, stages="inline")
    b.ask(asked("b1", learned(end_of_text=False)))
    assert (b.canvases["b1"][1][-NEW:] > NEW).any()


def test_alone_and_in_a_batch(bench: Make, filtered: LoadedModel) -> None:
    requests = [
        asked(f"r{i}", learned(), temperature=0.5 * (i % 2), recompute=dkv() if i % 3 else None) for i in range(6)
    ]
    single = bench(filtered, stages="inline")
    alone = [(single.ask(r).text, single.canvases[r.id][0].tolist()) for r in requests]
    together = bench(filtered)
    calls = together.submit(*requests)
    assert [(c.finished().text, together.canvases[c.request.id][0].tolist()) for c in calls] == alone


def test_models_without_a_filter_say_how_to_get_one(bench: Make, model: LoadedModel, filtered: LoadedModel) -> None:
    b = bench(model)
    assert "learned" not in b.engine.info.commit_policies
    assert "learned" in bench(filtered).engine.info.commit_policies
    for commit in (learned(), Policy(name="early_commit", base=learned())):
        with pytest.raises(Unimplemented, match=r"no .* policy 'learned'.*mmserve train-filter"):
            b.submit(asked("r1", commit))


def test_over_it_early_commit_works(bench: Make, filtered: LoadedModel) -> None:
    b = bench(filtered, stages="inline")
    never = {"early": 99.0, "middle": 99.0, "late": 99.0}
    over = b.ask(asked("a1", Policy(name="early_commit", options=never, base=learned())))
    plain = b.ask(asked("b1", learned()))
    assert (over.text, over.forwards) == (plain.text, plain.forwards)


def test_numbers_out_of_range(bench: Make, filtered: LoadedModel) -> None:
    with pytest.raises(InvalidArgument, match=r"diffusion\.learned: threshold must be above 0"):
        bench(filtered).submit(asked("r1", learned(threshold=0.0)))
