"""Prompt-lookup speculation: the plain greedy tokens, in fewer passes, whatever the draft is worth."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from harness import Bench
from helpers import ask, blank, picture, proposal, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from llama_checkpoints import Sighted, load

from mmserve.core.request import Policy
from mmserve.decode.commit.ngram import Ngram
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.models.base import LoadedModel

LAST, NONE, NGRAM = Policy(name="last"), Policy(name="none"), Policy(name="ngram")
PROMPTS = ("red circle, red circle, red", "what is left of it? " * 4, "a b c d a b c d a b", "?")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    loaded = load(Sighted(tmp_path_factory.mktemp("llava"), image_aspect_ratio="square").folder)
    return dataclasses.replace(loaded, spec=dataclasses.replace(loaded.spec, end_ids=frozenset({-1})))


def tokens_of(bench: Bench, name: str) -> list[int]:
    tokens, _committed = bench.canvases[name]
    return tokens.tolist()


@pytest.mark.parametrize("recompute", [LAST, NONE], ids=["last", "none"])
@pytest.mark.parametrize("images", [0, 2])
def test_the_tokens_are_the_plain_greedy_ones(model: LoadedModel, bench, recompute: Policy, images: int) -> None:
    b: Bench = bench(model, stages="inline")
    saved = 0
    for i, prompt in enumerate(PROMPTS[images:]):
        given_ = {"images": tuple(picture(j) for j in range(images)), "max_new_tokens": 24, "recompute": recompute}
        plain = b.ask(ask(f"p{i}", prompt, **given_))
        fast = b.ask(ask(f"f{i}", prompt, commit=NGRAM, **given_))
        assert tokens_of(b, f"f{i}") == tokens_of(b, f"p{i}")
        assert fast.text == plain.text and plain.forwards == 24
        assert fast.forwards <= plain.forwards
        saved += plain.forwards - fast.forwards
    assert saved > 0 or images, "a random model repeats itself in text: some drafts must have been right"


@pytest.mark.parametrize("right", [0, 1, 3, 6])
def test_a_draft_saves_a_pass_for_each_of_its_tokens_that_is_right(
    model: LoadedModel, bench, monkeypatch: pytest.MonkeyPatch, right: int
) -> None:
    """Drafts of six tokens made from the known answer, wrong from the ``right``-th on."""
    b: Bench = bench(model, stages="inline")
    plain = b.ask(ask("plain", PROMPTS[0], max_new_tokens=29, recompute=LAST))
    answer = np.array(tokens_of(b, "plain"))

    def draft(_self: Ngram, canvas) -> np.ndarray:
        known = canvas.known()
        drafted = answer[known : known + 6][: canvas.size - known - 1].copy()
        drafted[right:] = (drafted[right:] + 1) % 500
        return drafted

    monkeypatch.setattr(Ngram, "draft", draft)
    fast = b.ask(ask("fast", PROMPTS[0], max_new_tokens=29, recompute=LAST, commit=NGRAM))
    assert tokens_of(b, "fast") == answer.tolist()
    assert fast.forwards == -(-29 // (right + 1)) and fast.text == plain.text
    b.await_nothing_left()


def test_an_answer_with_drafts_is_the_same_among_strangers(model: LoadedModel, bench) -> None:
    def requests() -> list:
        return [
            ask(
                f"r{i}",
                PROMPTS[i % 4] + f" {i}",
                images=tuple(picture(i) for _ in range(i % 2)),
                max_new_tokens=(7, 16, 33)[i % 3],
                recompute=LAST,
                commit=NGRAM if i % 4 else None,
                temperature=(0.0, 0.8)[i % 2],
                seed=i,
            )
            for i in range(12)
        ]

    alone: Bench = bench(model, stages="inline")
    expected = {r.id: (alone.ask(r).forwards, tokens_of(alone, r.id)) for r in requests()}
    together: Bench = bench(model)
    calls = together.submit(*reversed(requests()))
    found = {c.request.id: (c.finished().forwards, tokens_of(together, c.request.id)) for c in calls}
    assert found == expected
    together.await_nothing_left()


def test_a_diffusion_model_has_no_next_token_to_draft(tmp_path: Path, bench) -> None:
    from helpers import tiny_model

    b: Bench = bench(tiny_model(vision=False))
    with pytest.raises(Unimplemented, match="no commit policy 'ngram'"):
        b.submit(ask("x", commit=NGRAM))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 9), st.integers(1, 3), st.integers(0, 2))
def test_a_draft_is_what_followed_the_last_tokens_before(
    prompt: list[int], length: int, shortest: int, more: int
) -> None:
    canvas = blank(0, 6, 1)
    canvas.tokens = np.concatenate([np.array(prompt, dtype=np.int64), canvas.tokens])
    canvas.committed_at = np.concatenate([np.full(len(prompt), -1, np.int64), canvas.committed_at])
    canvas.prompt_length = canvas.block_start = len(prompt)
    policy = Ngram(length=length, longest=shortest + more, shortest=shortest)
    drafted = policy.draft(canvas).tolist()
    assert len(drafted) <= min(length, 5)
    expected: list[int] = []
    for size in range(min(shortest + more, len(prompt) - 1), shortest - 1, -1):
        starts = [s for s in range(len(prompt) - size) if prompt[s : s + size] == prompt[-size:]]
        if starts:
            expected = prompt[starts[0] + size :][: min(length, 5)]
            break
    assert drafted == expected
    candidates = proposal(canvas, tokens=np.array([*drafted, 9]), positions=canvas.all_masked()[: len(drafted) + 1])
    assert policy.choose(canvas, candidates).all()
    if drafted:
        wrong = candidates.tokens.copy()
        wrong[len(drafted) // 2] = 9
        chosen = policy.choose(canvas, proposal(canvas, tokens=wrong, positions=candidates.positions))
        assert chosen.tolist() == [i <= len(drafted) // 2 for i in range(len(wrong))]


@pytest.mark.parametrize("commit", ["ngram", "edit"])
def test_a_penalty_on_what_stands_there_is_refused_where_that_is_judged(model: LoadedModel, bench, commit: str) -> None:
    b: Bench = bench(model) if commit == "ngram" else bench(tiny_model(vision=False))
    recompute = LAST if commit == "ngram" else None
    with pytest.raises(InvalidArgument, match=f"must not be set with the commit policy '{commit}'"):
        b.submit(ask("x", commit=Policy(name=commit), recompute=recompute, repetition_penalty=1.5))


@pytest.mark.parametrize(
    "numbers", [{"length": 0}, {"length": 65}, {"shortest": 0}, {"shortest": 5, "longest": 4}, {"longest": 17}]
)
def test_numbers_that_make_no_sense_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="|".join(numbers)):
        Ngram(**numbers)
