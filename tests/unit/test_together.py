"""Candidates of several requests from one pass over their logits: those that each has alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from mmserve.core.canvas import Canvas
from mmserve.core.request import Sampling, Streaming
from mmserve.decode.commit import Candidates
from mmserve.decode.commit.entropy_bound import EntropyBound
from mmserve.decode.commit.low_confidence import LowConfidence
from mmserve.decode.logits import by_slices, slice_rows
from mmserve.decode.sampler import Shared, candidates, verified_mask
from mmserve.decode.together import Member, share
from mmserve.models.base import ModelSpec
from mmserve.models.packed import FEWEST_ROWS

BANNED = (3, 70)
VOCABULARY = 40_003


class Head:
    """What of a decoder makes logits."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self._linear = nn.Linear(24, VOCABULARY, bias=False)
        self.products, self.fewest_rows = 0, FEWEST_ROWS

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, adapted: None = None) -> torch.Tensor:
        self.products += 1
        made: torch.Tensor = self._linear(hidden)
        return made


def requests(counts: list[int]) -> tuple[list[Member], Head]:
    """Requests with so many rows each, of every kind in turn: with log-probabilities, without, entropy, a penalty."""
    head = Head()
    hidden = torch.randn(sum(counts), 24, generator=torch.Generator().manual_seed(1))
    made: list[Any] = []
    for i, (count, logits) in enumerate(zip(counts, by_slices(cast(Any, head), hidden, counts, 8), strict=True)):
        canvas = Canvas.create(np.arange(5), new_tokens=64, block_length=64, mask_id=BANNED[0])
        request = SimpleNamespace(
            sampling=Sampling(temperature=0.0, repetition_penalty=1.3 if i % 4 == 3 else 1.0),
            streaming=Streaming(tokens=i % 4 == 0),
        )
        commit = EntropyBound() if i % 4 == 2 else LowConfidence()
        d = SimpleNamespace(request=request, canvas=canvas, commit=commit, extensions=())
        made.append((d, SimpleNamespace(targets=5 + np.arange(count)), logits))
    return made, head


def alone(member: Member, mask_id: int | None) -> Candidates:
    d, p, logits = member
    return candidates(logits, p.targets, d.canvas, d.request.sampling, BANNED, None, None, d.commit.reads, mask_id)


def judge(counts: list[int], *, causal: bool) -> tuple[int, int]:
    """Compares candidates bit for bit; how many requests were judged alone, and how many products were made."""
    spec = cast(ModelSpec, SimpleNamespace(causal=causal, banned_ids=BANNED, mask_id=BANNED[0]))
    members, head = requests(counts)
    rows, mask_id = share(members, spec, None), verified_mask(spec)
    together = [
        candidates(r, p.targets, d.canvas, d.request.sampling, BANNED, None, None, d.commit.reads, mask_id)
        for r, (d, p, _logits) in zip(rows, members, strict=True)
    ]
    made = head.products
    for count, member, found in zip(counts, requests(counts)[0], together, strict=True):
        d, p, _logits = member
        expected = alone(member, mask_id)
        plain = d.request.sampling.repetition_penalty == 1
        if plain and causal and count == 1 and not d.request.streaming.tokens and not d.commit.reads:
            expected = replace(expected, confidence=np.ones(1, np.float32))
        np.testing.assert_array_equal(found.positions, p.targets)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.confidence, expected.confidence)
        assert found.gap is None
        assert (found.entropy is None) == (expected.entropy is None)
        if found.entropy is not None and expected.entropy is not None:
            np.testing.assert_array_equal(found.entropy, expected.entropy)
        assert not np.isin(found.tokens, BANNED).any()
    return sum(not isinstance(r, Shared) for r in rows), made


@torch.inference_mode()
def test_next_tokens_of_a_batch_are_those_of_each_request_and_one_product_makes_them() -> None:
    assert judge([1] * 11, causal=True) == (2, 1)  # alone: those with a penalty


@torch.inference_mode()
def test_blocks_of_a_batch_are_those_of_each_request() -> None:
    assert judge([3, 8, 1, 5, 4, 7, 2], causal=False) == (1, 1)  # alone: that with a penalty


@torch.inference_mode()
def test_requests_of_several_products_are_each_in_one_of_them() -> None:
    most = slice_rows(VOCABULARY, torch.device("cpu"))
    assert judge([most - 1, 3, most - 3, 2, most + 5, 2], causal=False) == (2, 5)  # a penalty, and one cut in two


@torch.inference_mode()
def test_requests_with_the_same_biases_are_judged_together_and_have_their_effect() -> None:
    spec = cast(ModelSpec, SimpleNamespace(causal=False, banned_ids=BANNED, mask_id=BANNED[0]))
    never, gains = dict.fromkeys((11, 12), -1e9), {40: {40: 1e6}, 41: {41: 1e6}}
    biases = [never, gains[40], never, {}, gains[41], never, {}]
    members, others = (requests([2] * len(biases))[0] for _ in range(2))
    for member, bias in zip((*members, *others), biases * 2, strict=True):
        d = cast(Any, member[0])
        d.commit, d.request.sampling = LowConfidence(), Sampling(temperature=0.0, logit_bias=bias)
        d.request.streaming = Streaming()
    shared = share(members, spec, None)
    groups = [cast(Any, row).candidates.func.__self__ for row in shared]
    assert [groups.index(group) for group in groups] == [0, 1, 0, 3, 4, 0, 3]
    for row, (d, p, _logits), other, bias in zip(shared, members, others, biases, strict=True):
        mask_id = verified_mask(spec)
        found = candidates(row, p.targets, d.canvas, d.request.sampling, BANNED, None, None, d.commit.reads, mask_id)
        expected = alone(other, mask_id)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.confidence, expected.confidence)
        assert not np.isin(found.tokens, (*BANNED, 11, 12) if bias is never else BANNED).any()
        if bias in gains.values():
            assert found.tokens.tolist() == [*bias] * 2
