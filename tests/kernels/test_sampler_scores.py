"""The sampler over ``commit_scores``: the tokens it chooses without, noise that is counted, and no copy of logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from helpers import blank, tiny_model
from mmserve_kernels import dispatch
from mmserve_kernels.commit_scores import kernel, reference
from torch.utils._python_dispatch import TorchDispatchMode
from triton_harness import DEVICE, runs_kernels

from mmserve.core.canvas import Canvas
from mmserve.core.request import Sampling
from mmserve.decode.commit import Candidates
from mmserve.decode.loop import DiffusionDecoder
from mmserve.decode.parts import Parts
from mmserve.decode.sampler import candidates
from mmserve.decode.scores import CounterNoise, Scores
from mmserve.kv.store import KVStore

VOCAB = 331
BANNED = (0, 5, 330)
PATHS = [
    pytest.param(reference.commit_scores, id="reference"),
    pytest.param(kernel.commit_scores, id="kernel", marks=runs_kernels),
]


def logits(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    made[:, 5] += 20  # banned, and the best
    return made.to(DEVICE, dtype)


def chosen(values: torch.Tensor, sampling: Sampling, scores: Scores | None, canvas: Canvas | None = None) -> Candidates:
    canvas = canvas or blank(3, len(values), len(values))
    return candidates(values.clone(), canvas.all_masked(), canvas, sampling, BANNED, None, scores)


def assert_alike(one: Candidates, other: Candidates) -> None:
    for field in dataclasses.fields(Candidates):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if left is None:
            assert right is None, field.name
            continue
        assert left.dtype == right.dtype and left.shape == right.shape
        if left.dtype == np.int64:
            assert left.tolist() == right.tolist(), field.name
        else:
            np.testing.assert_allclose(left, right, rtol=3e-5, atol=3e-5, err_msg=field.name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("scores", PATHS)
def test_greedy_candidates_are_those_of_the_plain_sampler(scores: Scores, penalty: float, dtype: torch.dtype) -> None:
    values = logits(6, dtype=dtype)
    canvas = blank(3, 6, 6)
    canvas.tokens[:3] = values[0].argsort(descending=True)[1:4].cpu()  # the best are penalised
    sampling = Sampling(repetition_penalty=penalty, top_k=3)  # which drops nothing that is greedy
    assert_alike(chosen(values, sampling, scores, canvas), chosen(values, sampling, None, canvas))


@pytest.mark.parametrize("scores", PATHS)
def test_drawn_candidates_are_those_of_the_plain_sampler_with_the_same_noise(scores: Scores) -> None:
    """A filter that keeps everything goes through the plain sampler; it draws from the counted noise all the same."""
    values = logits(6)
    for sampling in (Sampling(temperature=0.7, seed=3), Sampling(temperature=1.5, seed=2**64 - 1)):
        fused = chosen(values, sampling, scores)
        assert_alike(fused, chosen(values, dataclasses.replace(sampling, top_k=VOCAB), scores))
        assert fused.tokens.tolist() != chosen(values, Sampling(), scores).tokens.tolist()
        assert not set(fused.tokens.tolist()) & set(BANNED)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mask", [0, 5])
@pytest.mark.parametrize("scores", [*PATHS, pytest.param(None, id="plain")])
def test_the_mask_has_its_part_in_the_figures_and_is_never_chosen(
    scores: Scores | None, mask: int, temperature: float
) -> None:
    """Token 5 is nearly certain, token 0 is like any other; the softmax of LLaDA's code has both."""
    values, canvas = logits(6), blank(3, 6, 6)
    values[3, mask] = -torch.inf
    sampling = Sampling(temperature=temperature, seed=4)
    without = candidates(values.clone(), canvas.all_masked(), canvas, sampling, BANNED, None, scores)
    found = candidates(values.clone(), canvas.all_masked(), canvas, sampling, BANNED, None, scores, mask_id=mask)
    assert found.tokens.tolist() == without.tokens.tolist()
    whole = values.double().cpu()
    best = whole.index_fill(-1, torch.tensor(BANNED), -torch.inf).topk(2, -1).values
    whole[:, [t for t in BANNED if t != mask]] = -torch.inf
    p = whole.softmax(-1)
    expected = p.gather(-1, torch.from_numpy(found.tokens)[:, None])[:, 0]
    np.testing.assert_allclose(found.confidence, expected, rtol=3e-5, atol=1e-12)
    np.testing.assert_allclose(found.entropy, torch.special.entr(p).sum(-1), rtol=1e-4, atol=3e-5)
    gap = best[:, 0] - torch.maximum(best[:, 1], whole[:, mask])
    np.testing.assert_allclose(found.gap, gap, rtol=1e-5, atol=1e-5)
    assert (found.gap < 0).sum() == (5 if mask == 5 else 0)


@runs_kernels
def test_the_kernel_draws_what_the_reference_draws() -> None:
    values, sampling = logits(16), Sampling(temperature=1.0, seed=7)
    assert_alike(*(chosen(values, sampling, s) for s in (reference.commit_scores, kernel.commit_scores)))


def test_a_draw_does_not_depend_on_which_positions_are_asked_for() -> None:
    values, sampling = logits(16), Sampling(temperature=1.0, seed=4)
    whole = chosen(values, sampling, reference.commit_scores)
    canvas = blank(3, 16, 16)
    canvas.commit(np.array([3, 7, 8, 18]), np.zeros(4, np.int64))
    left = canvas.all_masked() - 3
    part = chosen(values[left], sampling, reference.commit_scores, canvas)
    assert part.tokens.tolist() == whole.tokens[left].tolist()


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic per degree of freedom."""
    expected = probabilities * len(tokens)
    often = expected >= 5
    assert often.sum() > 3
    seen = np.bincount(tokens, minlength=len(probabilities))
    return float((((seen - expected) ** 2 / np.maximum(expected, 1e-9))[often]).sum() / (often.sum() - 1))


def test_frequencies_over_positions_steps_and_seeds_match_the_softmax() -> None:
    row = torch.randn(12, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected = (row.double() / 0.8).softmax(-1).cpu().numpy()

    def tokens(rows: int, seed: int, step: int) -> list[int]:
        canvas = blank(3, rows, rows)
        canvas.step = step
        sampling = Sampling(temperature=0.8, seed=seed)
        drawn = candidates(
            row.expand(rows, -1), canvas.all_masked(), canvas, sampling, (), None, reference.commit_scores
        )
        return drawn.tokens.tolist()

    over = {
        "positions": tokens(3000, 0, 0),
        "steps": [t for step in range(300) for t in tokens(1, 5, step)],
        "seeds": [t for seed in range(300) for t in tokens(1, seed, 3)],
    }
    for name, found in over.items():
        assert chi_square(np.array(found), expected) < 2.2, name
        assert chi_square(np.array(found), np.roll(expected, 1)) > 5, name


def test_no_two_rows_of_a_block_steps_and_seeds_share_their_noise() -> None:
    seeds: set[int] = set()
    for seed in (0, 1, 2, 2**63, 2**64 - 1):
        for step in range(20):
            canvas = blank(3, 1, 1)
            canvas.step = step
            offsets = np.arange(100)
            seeds |= set(CounterNoise(canvas, seed).draw(offsets, 1.0, DEVICE).seeds.tolist())
    assert len(seeds) == 5 * 20 * 100


class Copies(TorchDispatchMode):
    """Counts the tensors with a row of the vocabulary each that come to be in memory of their own."""

    def __init__(self, source: torch.Tensor) -> None:
        super().__init__()
        self.source, self.count = source.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == VOCAB:
                self.count += tensor.untyped_storage().data_ptr() != self.source
        return out


@runs_kernels
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_kernel_takes_no_copy_of_the_logits(temperature: float) -> None:
    values = logits(5, dtype=torch.bfloat16)
    canvas = blank(3, 5, 5)
    sampling = Sampling(temperature=temperature, seed=1)
    for scores, copied in ((kernel.commit_scores, False), (None, True)):
        with Copies(values) as copies:
            candidates(values, canvas.all_masked(), canvas, sampling, BANNED, None, scores)
        assert bool(copies.count) is copied


def test_rows_of_no_number_are_a_token_that_nothing_speaks_for() -> None:
    values = logits(3)
    values[1] = torch.nan
    found = chosen(values, Sampling(), reference.commit_scores)
    assert found.tokens[1] == 0 and found.confidence[1] == 0


def test_a_decoder_asks_once_and_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's sampler goes its own way; where the kernel is picked, the decoder hands it on."""
    model = tiny_model(vision=False)

    def decoder() -> DiffusionDecoder:
        store = KVStore(model.decoder.config, pages=4, page_size=8, dtype=model.dtype, device=model.device)
        return DiffusionDecoder(Parts.of(model, store))

    plain = decoder()
    assert plain.parts.proposer.scores is None and plain.parts.store.kernels["commit_scores"] == "pytorch"
    monkeypatch.setattr(dispatch, "_lacking", lambda *_: "")
    monkeypatch.setattr(dispatch, "_gpu_name", lambda _device: "a GPU")
    made = decoder()
    assert made.parts.proposer.scores is not None and made.parts.proposer.scores.__wrapped__ is kernel.commit_scores
    assert made.parts.store.kernels["commit_scores"] == "triton"
