"""Figures of logits against their definitions in fp64; drawn tokens against the noise, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmserve_kernels.commit_scores import CommitScores, Draw, reference
from mmserve_kernels.commit_scores import kernel as kernels
from mmserve_kernels.commit_scores.noise import _log, gumbel, philox
from mmserve_kernels.commit_scores.types import empty
from noise_kernel import noise
from triton_harness import DEVICE, runs_kernels

PATHS = [
    pytest.param(reference.commit_scores, id="reference"),
    pytest.param(kernels.commit_scores, id="kernel", marks=runs_kernels),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random logits with equals among them, in rows of a wider tensor whose rest is larger than any of them."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((rows, vocabulary + 5), 1e4)
    wide[:, :vocabulary] = (torch.randn(rows, vocabulary, generator=generator) * 4).round(decimals=1)
    return wide.to(DEVICE, dtype)[:, :vocabulary]


def words_of(may: torch.Tensor) -> torch.Tensor:
    """int32 words of a boolean mask ``[n, V]``; the bits of no token are set."""
    padded = torch.ones(len(may), -(-may.shape[1] // 32) * 32, dtype=torch.int64)
    padded[:, : may.shape[1]] = may
    words = (padded.unflatten(1, (-1, 32)) << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(DEVICE, torch.int32)


def drawing(rows: int, shaped: bool = False) -> Draw:
    """A seed and a temperature a row; every third row is greedy."""
    temperatures = torch.arange(rows) % 3 * 0.7
    return Draw((torch.arange(rows) * 7919 - 5).to(DEVICE), temperatures.to(DEVICE), shaped)


def exact(
    logits: torch.Tensor,
    k: int,
    banned: torch.Tensor | None = None,
    may: torch.Tensor | None = None,
    draw: Draw | None = None,
    mask_id: int | None = None,
) -> CommitScores:
    """The definition, in fp64; rows drawn with the reference's noise."""
    left = logits.cpu().double().nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
    mask = left[:, [] if mask_id is None else [mask_id]].clone()
    left[:, [] if mask_id is None else [mask_id]] = -torch.inf
    if banned is not None:
        left[:, banned.cpu()] = -torch.inf
    if may is not None:
        left[~may] = -torch.inf
    tempered = left if draw is None else left * draw.inverse().cpu().double()[:, None]
    if draw is not None and draw.shaped:
        left = tempered
        mask = mask * draw.inverse().cpu().double()[:, None]
    log_p = torch.cat([left, mask], 1).log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    order = left.sort(dim=-1, descending=True, stable=True).indices
    ids = torch.where(left.gather(1, order) == -torch.inf, -1, order)
    tokens = ids[:, 0]
    if draw is not None:
        noise = gumbel(draw.seeds.cpu(), logits.shape[1]) * draw.noise().cpu()[:, None]
        # In fp32, as it is drawn: in fp64 two that are close may stand the other way round.
        tokens = torch.where(tokens < 0, -1, (tempered.float() + noise).argmax(-1))
    top = torch.nn.functional.pad(left.gather(1, order), (0, 1), value=-torch.inf)
    top[:, 1] = torch.cat([top[:, 1:2], mask], 1).amax(1)
    return CommitScores(
        ids=ids[:, :k],
        log_probs=log_p.gather(1, order)[:, :k],
        gap=torch.where(ids[:, 0] < 0, 0.0, top[:, 0] - top[:, 1]),
        entropy=torch.special.entr(log_p.exp()).sum(-1),
        tokens=tokens,
        token_log_probs=torch.where(tokens < 0, -torch.inf, log_p.gather(1, tokens.clamp(min=0)[:, None])[:, 0]),
    )


def assert_scores(made: CommitScores, wanted: CommitScores) -> None:
    for field in fields(CommitScores):
        got, want = getattr(made, field.name).cpu(), getattr(wanted, field.name).cpu()
        if got.dtype == torch.int64:
            assert torch.equal(got, want), field.name
        else:
            torch.testing.assert_close(
                got.double(), want.double(), rtol=2e-5, atol=2e-5, msg=lambda m, f=field: f"{f.name}: {m}"
            )


@pytest.fixture(autouse=True)
def poisoned_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel is to fill holds NaN and impossible ids."""

    def room(rows: int, k: int, device: torch.device) -> CommitScores:
        out = empty(rows, k, device)
        for field in fields(out):
            tensor = getattr(out, field.name)
            tensor.fill_(-77 if tensor.dtype == torch.int64 else torch.nan)
        return out

    monkeypatch.setattr(kernels, "empty", room)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask_id", [None, 7, 100])
@pytest.mark.parametrize("options", ["plain", "masked", "drawn", "shaped"])
@pytest.mark.parametrize("commit_scores", PATHS)
def test_every_option_agrees_with_its_definition(
    commit_scores, options: str, mask_id: int | None, dtype: torch.dtype
) -> None:
    """Token 7 is banned besides, and the most probable one of the first row."""
    rows, vocabulary, k = 4, 333, 5
    logits = logits_of(rows, vocabulary, dtype)
    logits[0, 7] = 30.0
    arguments: dict[str, object] = {"mask_id": mask_id}
    may = None
    if options != "plain":
        arguments["banned"] = torch.tensor([0, 7, 332], device=DEVICE)
    if options in ("masked", "shaped"):
        may = torch.rand(rows, vocabulary, generator=torch.Generator().manual_seed(1)) < 0.5
        arguments["allowed"] = words_of(may)
    if options in ("drawn", "shaped"):
        arguments["draw"] = drawing(rows, shaped=options == "shaped")
    made = commit_scores(logits, k, **arguments)
    arguments.pop("allowed", None)
    assert_scores(made, exact(logits, k, may=may, **arguments))


@pytest.mark.parametrize(("rows", "vocabulary", "k"), [(1, 1, 1), (7, 2, 2), (2, 63, 20), (1, 4096, 1), (2, 9000, 3)])
@pytest.mark.parametrize("commit_scores", PATHS)
def test_odd_shapes_and_many_chunks(commit_scores, rows: int, vocabulary: int, k: int) -> None:
    logits = logits_of(rows, vocabulary)
    assert_scores(commit_scores(logits, k), exact(logits, k))


@pytest.mark.parametrize("rows", [63, 100, 333])
def test_many_rows(rows: int) -> None:
    logits = logits_of(rows, 1500)
    assert_scores(reference.commit_scores(logits, 2), exact(logits, 2))


@pytest.mark.parametrize("commit_scores", PATHS)
def test_no_rows_and_rows_with_few_tokens_or_none(commit_scores) -> None:
    assert commit_scores(logits_of(0, 40), 2).ids.shape == (0, 2)
    logits, draw = logits_of(3, 40), drawing(3)
    may = torch.zeros(3, 40, dtype=torch.bool)
    may[1, 33] = may[2, 5] = may[2, 39] = True
    made = commit_scores(logits, 3, allowed=words_of(may), draw=draw)
    assert made.ids[:2].tolist() == [[-1, -1, -1], [33, -1, -1]]
    assert made.tokens[:2].tolist() == [-1, 33]
    assert made.gap[:2].tolist() == [0, torch.inf]
    assert_scores(made, exact(logits, 3, may=may, draw=draw))
    masked = commit_scores(logits, 3, allowed=words_of(may), draw=draw, mask_id=39)
    assert masked.tokens[:2].tolist() == [-1, 33] and masked.ids[2].tolist() == [5, -1, -1]
    assert_scores(masked, exact(logits, 3, may=may, draw=draw, mask_id=39))


@pytest.mark.parametrize("commit_scores", PATHS)
def test_equal_logits_rank_by_id_and_what_is_no_number_cannot_be_chosen(commit_scores) -> None:
    logits = torch.zeros(3, 200, device=DEVICE)
    logits[0, ::2] = -0.0
    logits[1, 3:150] = torch.nan
    logits[2, 90] = torch.inf
    made = commit_scores(logits, 4)
    assert made.ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 150], [90, 0, 1, 2]]
    assert_scores(made, exact(logits, 4))


@pytest.mark.filterwarnings("ignore:overflow encountered in multiply")  # which numpy tells of, and a GPU does not
@pytest.mark.parametrize("commit_scores", PATHS)
def test_a_temperature_makes_no_infinity_of_a_large_logit(commit_scores) -> None:
    logits = torch.tensor([[1.0, torch.inf, 2.0], [3e38, 0.0, -3e38]], device=DEVICE)
    draw = Draw(torch.arange(2, device=DEVICE), torch.full((2,), 0.5, device=DEVICE), shaped=True)
    made = commit_scores(logits, 2, draw=draw)
    assert made.ids[:, 0].tolist() == made.tokens.tolist() == [1, 0]
    assert made.log_probs[:, 0].tolist() == made.token_log_probs.tolist() == [0, 0]
    assert made.entropy.tolist() == [0, 0] and made.gap.isfinite().all()


@pytest.mark.parametrize("commit_scores", PATHS)
def test_a_row_is_the_same_alone_and_among_others_bit_for_bit(commit_scores) -> None:
    logits, draw = logits_of(5, 5000, torch.bfloat16), drawing(5)
    together = commit_scores(logits, 2, draw=draw)
    alone = commit_scores(logits[3:4], 2, draw=Draw(draw.seeds[3:4], draw.temperatures[3:4]))
    for field in fields(CommitScores):
        assert torch.equal(getattr(together, field.name)[3:4], getattr(alone, field.name)), field.name


@settings(max_examples=12)
@given(st.data())
def test_reference_of_any_shape(data: st.DataObject) -> None:
    _any_shape(data, reference.commit_scores)


@runs_kernels
@settings(max_examples=4)
@given(st.data())
def test_kernel_of_any_shape(data: st.DataObject) -> None:
    _any_shape(data, kernels.commit_scores)


def _any_shape(data: st.DataObject, commit_scores) -> None:
    rows, vocabulary = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 700))
    k = data.draw(st.integers(1, min(vocabulary, 9)))
    logits = logits_of(rows, vocabulary, data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 99)))
    generator = torch.Generator().manual_seed(vocabulary)
    may = torch.rand(rows, vocabulary, generator=generator) < data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    draw = drawing(rows, data.draw(st.booleans()))
    made = commit_scores(logits, k, allowed=words_of(may), draw=draw)
    assert_scores(made, exact(logits, k, may=may, draw=draw))


def test_random_integers_are_those_of_philox() -> None:
    """The published answer at counter 0, key 0, and one of a key with both halves."""
    assert philox(torch.tensor([0]), torch.tensor([0])).flatten().tolist() == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]
    everything = philox(torch.tensor([-1]), torch.arange(4))
    assert everything.unique().numel() == 16
    assert 0 <= int(everything.min()) <= int(everything.max()) < 1 << 32


@runs_kernels
def test_the_kernel_makes_the_same_noise_bit_for_bit() -> None:
    seeds = torch.tensor([0, 1, -1, 1 << 40, -(1 << 63)], device=DEVICE)
    out = torch.full((5, 4096), torch.nan, device=DEVICE)
    noise[(5,)](seeds, out, COUNT=4096, enable_fp_fusion=False)
    assert torch.equal(out.cpu(), gumbel(seeds.cpu(), 4096))


def test_noise_is_gumbel_and_its_logarithm_right_to_the_last_bits() -> None:
    y = torch.cat([torch.rand(4000) * 24 + 1e-6, 10 ** torch.linspace(-9.9, 1.3, 4000), 1 + torch.randn(4000) * 1e-4])
    near, right = _log(y).double(), y.double().log()
    assert ((near - right).abs() <= 2.0**-22 * right.abs().clamp_min(2.0**-10)).all()
    noise = gumbel(torch.arange(8), 50_000).double()
    levels = torch.linspace(-1.5, 8, 40, dtype=torch.float64)
    share = (noise.flatten()[:, None] <= levels).double().mean(0)
    assert (share - (-(-levels).exp()).exp()).abs().max() < 2e-3  # over 400,000 draws: 3 standard deviations


def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf, 0.5])
    rows = 20_000
    draw = Draw(torch.arange(rows), torch.full((rows,), 0.7))
    made = reference.commit_scores(logits.expand(rows, -1), draw=draw)
    wanted = (logits / 0.7).softmax(-1)
    share = torch.bincount(made.tokens, minlength=6) / rows
    assert ((share - wanted).abs() <= 4 * (wanted * (1 - wanted) / rows).sqrt()).all()


def test_what_does_not_fit_is_refused() -> None:
    logits = torch.zeros(2, 10)
    for wrong in (
        {"k": 0},
        {"k": 11},
        {"banned": torch.tensor([1.0])},
        {"mask_id": 10},
        {"mask_id": -1},
        {"allowed": torch.zeros(2, 2, dtype=torch.int32)},
        {"draw": Draw(torch.zeros(2, dtype=torch.int32), torch.zeros(2))},
        {"draw": Draw(torch.zeros(2, dtype=torch.int64), torch.zeros(3))},
    ):
        with pytest.raises(ValueError, match="must be"):
            reference.commit_scores(logits, **wrong)
    with pytest.raises(ValueError, match="must be fp32"):
        reference.commit_scores(logits.double())


_FUSED = """
from noise_kernel import noise
from mmserve_kernels.commit_scores import kernel
from mmserve_kernels.aot import TARGETS, Variant, compiled

targets = {target.name: target for target in TARGETS}
drawn = next(variant for variant in kernel.variants() if variant.name == "chunk bf16 drawn")
text = compiled(drawn, targets["sm_90"]).asm["ptx"]
assert "mul.rn.f32" in text and "fma" not in text
alone = Variant("noise", noise, {"seeds": "*i64", "out": "*fp32"}, {"COUNT": 1024}, fp_fusion=False)
text = compiled(alone, targets["gfx942"]).asm["amdgcn"]
assert "mul_f32" in text and "fma" not in text and "v_mad_f" not in text
print("checked")
"""


@pytest.mark.slow
def test_no_compiler_fuses_a_product_of_the_noise_with_a_sum() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", _FUSED], capture_output=True, text=True, env=environment)
    assert run.stdout == "checked\n", run.stderr
