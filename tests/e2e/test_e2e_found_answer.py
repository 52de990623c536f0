"""Early commit behind a text that the bundled model writes itself, over real gRPC."""

from __future__ import annotations

import math
from typing import Any

import pytest
from e2e_helpers import Running, answer

from mmserve.client import EarlyCommit, Result
from mmserve.errors import InvalidArgument

SUMS = tuple(f"Start with {a}. Add {b}. What is the result?" for a, b in ((12, 30), (45, 17), (9, 8)))
OPTIONS: dict[str, Any] = {"max_new_tokens": 32, "block_length": 32, "tokens": True}
AT_ONCE = {"early": -math.inf, "middle": -math.inf, "late": -math.inf}


def first_word(result: Result) -> tuple[str, int]:
    """Text of the earliest token that occurs once and not last, and the pass after which it was final."""
    texts = [t.text for t in result.tokens]
    once = [t for t in result.tokens[:-1] if t.text.strip().isalnum() and result.text.count(t.text.strip()) == 1]
    assert once, texts
    earliest = min(once, key=lambda t: t.step)
    return earliest.text.strip(), earliest.step


@pytest.mark.parametrize("prompt", SUMS)
def test_once_the_text_is_final_the_rest_follows_in_one_pass(server: Running, prompt: str) -> None:
    plain = server.client.generate(prompt, commit="low_confidence", **OPTIONS)
    text, step = first_word(plain)
    for length in (0, 2):
        commit = EarlyCommit(**AT_ONCE, answer_after=text, answer_length=length, base="low_confidence")
        found = server.client.generate(prompt, commit=commit, **OPTIONS)
        assert found.forwards == min(step + 1, plain.forwards)
        assert {t.step for t in found.tokens} <= set(range(1, step + 2))
        earlier = {i: t for i, t in enumerate(plain.tokens) if t.step <= step}
        assert all(found.tokens[i] == t for i, t in earlier.items() if i < len(found.tokens))


def test_a_text_that_never_comes_leaves_it_to_the_base(server: Running) -> None:
    for length in (0, 5):
        commit = EarlyCommit(**AT_ONCE, answer_after="Zwiebelkuchen", answer_length=length, base="threshold")
        found = server.client.generate(SUMS[0], commit=commit, **OPTIONS)
        assert answer(found) == answer(server.client.generate(SUMS[0], commit="threshold", **OPTIONS))


@pytest.mark.parametrize(
    ("commit", "fields"),
    [
        (EarlyCommit(answer_after="x" * 257), ["diffusion.early_commit.answer_after"]),
        (EarlyCommit(answer_after="é" * 129), ["diffusion.early_commit.answer_after"]),
        (EarlyCommit(answer_after="x", answer_start=1), ["diffusion.early_commit.answer_start"]),
        (EarlyCommit(answer_after="x", answer_length=33), ["diffusion.early_commit.answer_length"]),
    ],
    ids=["too long", "too many bytes", "begins twice", "longer than the canvas"],
)
def test_texts_that_are_refused(server: Running, commit: EarlyCommit, fields: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        server.client.generate("x", commit=commit, max_new_tokens=32)
    assert [v.field for v in caught.value.violations] == fields
