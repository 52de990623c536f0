"""Column sums of attention against fp64, and in no more memory than the sums take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import BATCHES, HEADS, Case, build, plain_lse
from hypothesis import given, settings
from hypothesis import strategies as st
from mmserve_kernels.attention_scores import kernel, reference
from mmserve_kernels.cached_attention import Ragged
from mmserve_kernels.cached_attention import reference as cached
from mmserve_kernels.cached_attention.tiles import Tiling
from torch.utils._python_dispatch import TorchDispatchMode
from triton_harness import DEVICE, assert_near, runs_kernels

PATHS = [
    pytest.param(reference.attention_scores, id="reference"),
    pytest.param(kernel.attention_scores, id="kernel", marks=runs_kernels),
]
SHAPES = {**BATCHES, "very uneven": [(1, 200), (63, 65), (2, 2), (1, 1)]}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def small_blocks_and_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that small cases have several; what the kernel is to fill holds NaN."""
    monkeypatch.setattr(kernel, "tiling", lambda *_, **__: Tiling(64, 64, 64, 4, 1))
    monkeypatch.setattr(kernel, "_room", lambda *shape, device: torch.full(shape, torch.nan, device=device))


def scores(attention_scores, case: Case, lse: torch.Tensor | None = None) -> torch.Tensor:
    return attention_scores(case.q.to(DEVICE), case.k_pages.to(DEVICE), moved(case.ragged), lse_TH=lse)


def moved(ragged: Ragged) -> Ragged:
    limit = None if ragged.kv_limit is None else ragged.kv_limit.to(DEVICE)
    tables = tuple(table.to(DEVICE) for table in ragged.page_tables)
    return replace(ragged, page_tables=tables, slots=ragged.slots.to(DEVICE), kv_limit=limit)


def exact(case: Case) -> torch.Tensor:
    """From the definition, a request and a head at a time, in fp64."""
    heads, head_size = case.q.shape[1:]
    sums, start = [], 0
    for rows, key in zip(case.ragged.row_counts, case.keys, strict=True):
        here = slice(start, start + rows)
        own = torch.zeros(len(key), heads, dtype=torch.float64)
        for head in range(heads):
            shared = key[:, head * key.shape[1] // heads].double()
            weights = case.q[here, head].double() @ shared.T / head_size**0.5
            if case.ragged.kv_limit is not None:
                weights[torch.arange(len(key)) >= case.ragged.kv_limit[here, None]] = -torch.inf
            own[:, head] = weights.softmax(-1).nan_to_num(0).sum(0)
        sums.append(own)
        start += rows
    return torch.cat(sums)


@pytest.mark.parametrize("attention_scores", PATHS)
@pytest.mark.parametrize(
    ("batch", "page_size", "heads", "kv_limit"),
    [
        ("one row", 16, "gqa", None),
        ("one row of many", 7, "mha", None),
        ("odd", 16, "mqa", "block"),
        ("empty among others", 1, "gqa", "block"),
        ("very uneven", 16, "mha", "causal"),
        ("whole pages", 64, "mha", None),
    ],
)
def test_agrees_with_the_definition(
    attention_scores, batch: str, page_size: int, heads: str, kv_limit: str | None
) -> None:
    case = build(SHAPES[batch], page_size, heads, kv_limit=kv_limit)
    made = scores(attention_scores, case)
    assert made.shape == (sum(case.ragged.kv_lengths), case.q.shape[1])
    assert_near(made, exact(case), torch.float32)


@pytest.mark.parametrize("attention_scores", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_a_head_size_that_is_no_power_of_two(attention_scores, dtype: torch.dtype) -> None:
    case = build([(13, 70), (1, 33)], 16, "gqa", kv_limit="block", head_dim=24, dtype=dtype)
    assert_near(scores(attention_scores, case), exact(case), torch.float32, scale=4)


@pytest.mark.parametrize("attention_scores", PATHS)
def test_rows_that_see_nothing_count_for_nothing(attention_scores) -> None:
    case = build([(5, 40)], 16, "mha", kv_limit="causal")
    case.ragged.kv_limit[1:4] = 0
    made = scores(attention_scores, case)
    assert_near(made, exact(case), torch.float32)
    assert made.sum().item() == pytest.approx(2 * 3, rel=1e-5), "two rows of three heads"


@pytest.mark.parametrize("attention_scores", PATHS)
def test_log_sums_that_attention_has_left_are_used(attention_scores) -> None:
    case = build([(9, 50), (3, 20)], 16, "gqa", kv_limit="causal")
    lse = torch.full(case.q.shape[:2], torch.nan)
    cached.cached_attention(case.q, case.k_pages, case.v_pages, case.ragged, lse_TH=lse)
    torch.testing.assert_close(lse.double(), plain_lse(case), rtol=1e-5, atol=1e-5)
    assert_near(scores(attention_scores, case, lse.to(DEVICE)), exact(case), torch.float32)
    lower = scores(attention_scores, case, (lse + 1).to(DEVICE))
    assert_near(lower, exact(case) / torch.e, torch.float32)


@pytest.mark.parametrize("attention_scores", PATHS)
def test_one_row_an_image_is_the_attention_of_its_class_token(attention_scores) -> None:
    """Keys of a vision tower as they are: a page an image."""
    generator = torch.Generator().manual_seed(5)
    q, k = torch.randn(3, 4, 16, generator=generator), torch.randn(3, 37, 4, 16, generator=generator)
    images = Ragged((1, 1, 1), (37, 37, 37), tuple(torch.tensor([i]) for i in range(3)), torch.arange(3))
    made = attention_scores(q.to(DEVICE), k.to(DEVICE), moved(images))
    wanted = torch.einsum("bhk,blhk->blh", q, k).div(4).double().softmax(1)
    assert_near(made.unflatten(0, (3, 37)), wanted, torch.float32)


@pytest.mark.parametrize("attention_scores", PATHS)
def test_a_request_is_the_same_alone_and_among_others_bit_for_bit(attention_scores) -> None:
    together = build([(5, 70), (9, 50), (20, 20)], 16, "gqa", contents=[0, 1, 2])
    alone = build([(9, 50)], 16, "gqa", seed=1, contents=[1])
    assert torch.equal(scores(attention_scores, together)[70:120], scores(attention_scores, alone))


@settings(max_examples=10)
@given(st.data())
def test_reference_of_any_shape(data: st.DataObject) -> None:
    _any_shape(data, reference.attention_scores)


@runs_kernels
@settings(max_examples=4)
@given(st.data())
def test_kernel_of_any_shape(data: st.DataObject) -> None:
    _any_shape(data, kernel.attention_scores)


def _any_shape(data: st.DataObject, attention_scores) -> None:
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    batch = [(data.draw(st.integers(0, min(length, 40))), length) for length in lengths]
    heads, limit = data.draw(st.sampled_from(sorted(HEADS))), data.draw(st.sampled_from([None, "causal", "block"]))
    case = build(batch, data.draw(st.sampled_from([1, 7, 16])), heads, kv_limit=limit)
    assert_near(scores(attention_scores, case), exact(case), torch.float32)


class _Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_memory_grows_with_positions_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_SLICE_ELEMENTS", 20_000)
    most = []
    for length in (300, 600):
        case = build([(length, length)], 16, "mha")
        with _Largest() as largest:
            reference.attention_scores(case.q, case.k_pages, case.ragged)
        most.append(largest.elements)
    assert most[1] <= 2.1 * most[0]
    assert most[1] < 600 * 600 / 10
