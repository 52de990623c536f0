"""Candidates by the slice: the same bits as from all rows at once, and no temporary larger than a slice."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ask, blank, dkv, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from mmserve.core.canvas import Canvas
from mmserve.core.encoded import Encoded
from mmserve.core.request import Policy, Request, Sampling
from mmserve.decode import logits as by_slice
from mmserve.decode.commit import Candidates
from mmserve.decode.logits import by_slices
from mmserve.decode.loop import DiffusionDecoder
from mmserve.decode.parts import Parts
from mmserve.decode.sampler import candidates
from mmserve.kv.store import KVStore
from mmserve.kv.table import PageTable
from mmserve.models.base import LoadedModel

VOCAB = 97
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.3, seed=2**64 - 1, top_p=0.8),
    Sampling(temperature=0.5, seed=5, top_k=7, min_p=0.05),
    Sampling(temperature=1.0, seed=6, repetition_penalty=1.4),
]


class Peak(TorchDispatchMode):
    """Notes the most elements that any operation gave back in one tensor, if its rows are ``width`` wide.

    The weight of the head, turned round, is such a tensor too; but nothing that was made.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.most = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == self.width:
                self.most = max(self.most, 0 if func is torch.ops.aten.t.default else tensor.numel())
        return out


def far_canvas(masked: int) -> Canvas:
    """Of ``masked`` open positions two are of the block; a third was one, and is committed."""
    canvas = blank(4, masked + 1, 3)
    canvas.commit(np.array([5]), np.array([9]))
    canvas.step = 2
    return canvas


def same(one: Candidates, other: Candidates) -> None:
    for field in dataclasses.fields(Candidates):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if left is None:
            assert right is None, field.name
            continue
        assert left.dtype == right.dtype and left.tobytes() == right.tobytes(), field.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
@pytest.mark.parametrize("rows", [1, 2, 5, 19, 20])
def test_slices_give_the_bits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, rows: int, sampling: Sampling, dtype: torch.dtype
) -> None:
    canvas = far_canvas(20)
    logits = (torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
    whole = candidates(logits.clone(), canvas.all_masked(), canvas, sampling, (0, 3))
    monkeypatch.setattr(by_slice, "SLICE_ELEMENTS", rows * VOCAB)
    copy = logits.clone()
    with Peak(VOCAB) as peak:
        same(candidates(copy, canvas.all_masked(), canvas, sampling, (0, 3)), whole)
    assert peak.most == rows * VOCAB


@pytest.mark.parametrize("seed", [0, 7])
def test_the_noise_is_that_of_the_block_and_of_what_follows_drawn_whole(seed: int) -> None:
    """As the sampler drew it before it went by slices: one tensor for the block, one for all to the right."""
    canvas = far_canvas(20)
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(1))
    mixed = (seed * 0x9E3779B97F4A7C15 + (canvas.step + 1) * 0xBF58476D1CE4E5B9) % (1 << 63)
    generator = torch.Generator().manual_seed(mixed)
    block, farther = canvas.block_end - canvas.block_start, canvas.size - canvas.block_end
    drawn = [torch.empty(n, VOCAB).exponential_(generator=generator) for n in (block, farther)]
    at = torch.from_numpy(canvas.all_masked() - canvas.block_start)
    expected = (logits / 0.8 - torch.cat(drawn).clamp_min(1e-30).log()[at]).argmax(-1)
    found = candidates(logits.clone(), canvas.all_masked(), canvas, Sampling(temperature=0.8, seed=seed), ())
    assert found.tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("rows", [1, 3, 8, 100])
@torch.inference_mode()
def test_a_batch_is_cut_the_same_way_for_each_request_and_padded_to_the_floor(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    model = tiny_model(vision=False)
    vocab = model.decoder.config.vocab_size
    monkeypatch.setattr(by_slice, "SLICE_ELEMENTS", rows * vocab)
    counts = [5, 0, 1, 17, 3, 8]
    hidden = torch.randn(sum(counts), model.decoder.config.hidden_size)
    whole = model.decoder.logits(hidden).split(counts)
    with Peak(vocab) as peak:
        read = [list(of.slices()) for of in by_slices(model.decoder, hidden, counts, 8)]
    for found, expected in zip(read, whole, strict=True):
        assert [len(f) for f in found[:-1]] == [rows] * max(0, len(found) - 1), "cut from its own first row on"
        assert torch.equal(torch.cat([expected[:0], *found]), expected)
    assert peak.most <= max(rows, 8) * vocab


def decoder_of(model: LoadedModel) -> DiffusionDecoder:
    store = KVStore(model.decoder.config, pages=16, page_size=8, dtype=model.dtype, device=model.device)
    return DiffusionDecoder(Parts.of(model, store))


def decode_history(decoder: DiffusionDecoder, request: Request, prompt: np.ndarray) -> tuple[list[int], list[int], int]:
    """The canvas of ``request`` at its end, and its passes."""
    begun = decoder.begin(request, Encoded(prompt, np.zeros(0, np.int64), None), PageTable(tuple(range(16))))
    [prefilled] = decoder.prefill([(request, begun)])
    assert prefilled is not None
    state = decoder.open(request, prefilled)
    while decoder.commit(state).reason is None:
        decoder.propose([state])
    return state.canvas.tokens.tolist(), state.canvas.committed_at.tolist(), state.forwards


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("recompute", [None, dkv()], ids=["none", "dkv_decode"])
def test_an_answer_region_takes_no_logits_of_the_whole_canvas(
    monkeypatch: pytest.MonkeyPatch, recompute: Policy | None, temperature: float
) -> None:
    """Every masked position has a candidate at each step, and the canvas the history it has with all rows at once."""
    model = tiny_model(vision=False)
    vocab = model.decoder.config.vocab_size
    never = {"early": 99.0, "middle": 99.0, "late": 0.0}
    commit = Policy(name="early_commit", options={**never, "answer_start": 30, "answer_length": 4})
    request = ask("r", commit=commit, recompute=recompute, max_new_tokens=60, block=8, temperature=temperature)
    prompt = np.arange(40, 60)
    decoder = decoder_of(model)
    expected = decode_history(decoder, request, prompt)
    assert expected[2] < 60
    monkeypatch.setattr(by_slice, "SLICE_ELEMENTS", 10 * vocab)
    with Peak(vocab) as peak:
        assert decode_history(decoder, request, prompt) == expected
    floor = decoder.parts.runner.floor  # matrix products are padded to a multiple of that many rows
    assert peak.most == -(-10 // floor) * floor * vocab, "60 positions were judged, ten at a time"
