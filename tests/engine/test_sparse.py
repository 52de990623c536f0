"""Sparse attention in the engine: all of the blocks is dense attention, fewer leave a request's tokens its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from harness import Bench
from helpers import ask, blank, picture, tiny_model
from mmserve_kernels.sparse_attention import Rows
from sparse_cases import page_bounds
from torch import Tensor

from mmserve.config import SPARSE_DECODE, SPARSE_PREFILL, EngineConfig, from_mapping
from mmserve.core.constraint import ConstraintSampling, ConstraintSpec, Regex
from mmserve.core.request import Policy
from mmserve.decode.forward import Pass, forward, row_floor
from mmserve.errors import ConfigError, Unimplemented
from mmserve.kv.sparse import DECODE, PREFILL, Selection, Sparse, View, selecting_layers
from mmserve.kv.store import KVStore
from mmserve.models.base import Attention, LoadedModel

Make = Callable[..., Bench]
PAGE = 16
SIZES, ROWS = [150, 37, 100], [20, 37, 5]


@pytest.fixture(scope="module")
def causal(text_model: LoadedModel) -> LoadedModel:
    """The tiny model, decoded from left to right."""
    spec = dataclasses.replace(text_model.spec, attention=Attention.CAUSAL, logit_shift=1)
    return dataclasses.replace(text_model, spec=spec)


def engine(**numbers: object) -> EngineConfig:
    return EngineConfig(page_size=PAGE, sparse_block=16, prefix_cache=False, **numbers)  # type: ignore[arg-type]


@torch.inference_mode()
def logits(model: LoadedModel, config: EngineConfig, batch: list[int]) -> tuple[list[Tensor], KVStore]:
    """Logits of a prefill pass and of a decode pass over the last rows, of each request of ``batch``."""
    store = KVStore(model.decoder.config, pages=40, page_size=PAGE, dtype=model.dtype, device=model.device)
    for tensor in (*store.keys, *store.values):
        tensor.fill_(torch.nan)
    sparse = Sparse(model, store, config) if config.sparse_prefill or config.sparse_decode else None
    pages = np.split(np.random.default_rng(1).permutation(40), np.cumsum([-(-size // PAGE) for size in SIZES]))
    draw = np.random.default_rng(0)
    tokens = [draw.integers(0, 400, (2, size)) for size in SIZES]
    out: list[Tensor] = []
    for step in range(2):
        passes = []
        for i in batch:
            rows = np.arange(SIZES[i])[-ROWS[i] if step else 0 :]
            changed = tokens[i][0].copy()
            changed[rows] = tokens[i][step][rows]
            embeddings = model.decoder.embed(torch.from_numpy(changed))
            passes.append(Pass(blank(1, SIZES[i] - 1, 4), pages[i], embeddings, rows, rows, rows, SIZES[i]))
        selection = None if sparse is None else (sparse.decode if step else sparse.prefill)
        found = forward(model, store, passes, row_floor(model), sparse=sparse, selection=selection)
        out += [torch.cat(list(of.slices())) for of in found]
    return out, store


NAMES = [("sparse_prefill", n) for n in PREFILL] + [("sparse_decode", n) for n in DECODE]


@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize(("stage", "builder"), NAMES)
def test_all_blocks_are_dense_attention_and_fewer_are_not(
    kind: str, stage: str, builder: str, text_model: LoadedModel, causal: LoadedModel
) -> None:
    model = causal if kind == "causal" else text_model
    dense, _ = logits(model, engine(), [0, 1, 2])
    whole, _ = logits(model, engine(**{stage: builder}), [0, 1, 2])
    for mine, wanted in zip(whole, dense, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5)
    less, _ = logits(model, engine(**{stage: builder, "sparse_density": 0.25}), [0, 1, 2])
    assert all(x.isfinite().all() for x in less)
    first = 3 if stage == "sparse_decode" else 0
    if builder != "tidal":  # of two layers, its first two see everything
        assert (less[first] - dense[first]).abs().max() > 1e-4
    alone, _ = logits(model, engine(**{stage: builder, "sparse_density": 0.25}), [0])
    for mine, wanted in zip((less[0], less[3]), alone, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["full", "causal"])
def test_summaries_of_pages_are_those_of_the_keys_in_them(
    kind: str, text_model: LoadedModel, causal: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Sparse] = []
    first = Sparse.__init__

    def kept(self: Sparse, *arguments: object) -> None:
        first(self, *arguments)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Sparse, "__init__", kept)
    config = engine(sparse_decode="quest", sparse_density=0.25)
    _, store = logits(causal if kind == "causal" else text_model, config, [0, 1, 2])
    bounds = made[0]._bounds
    assert bounds is not None
    pages = np.split(np.random.default_rng(1).permutation(40), np.cumsum([-(-size // PAGE) for size in SIZES]))
    for layer, keys in enumerate(store.keys):
        for table, size in zip(pages, SIZES, strict=False):
            low, high = page_bounds(keys[table].flatten(0, 1)[:size], PAGE)
            assert torch.equal(bounds.low[layer][table], low)
            assert torch.equal(bounds.high[layer][table], high)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("query_aware", "quest"),
        pytest.param("segments", "double_sparse", marks=pytest.mark.slow),
        pytest.param("", "tidal", marks=pytest.mark.slow),
    ],
)
def test_a_request_has_its_own_tokens_in_any_batch(bench: Make, prefill: str, decode: str) -> None:
    b = bench(
        stages="inline",
        page_size=16,
        sparse_prefill=prefill,
        sparse_decode=decode,
        sparse_density=0.5,
        sparse_block=16,
    )

    def requests(names: str) -> list[object]:
        policies = [None, Policy(name="dual"), Policy(name="adaptive")]
        return [
            ask(
                f"{names}{i}",
                "what is left of the red circle, and what is on top of it? " * (1 + i),
                images=(picture(i),),
                max_new_tokens=8,
                recompute=policies[i],
            )
            for i in range(3)
        ]

    alone = [b.ask(request).text for request in requests("alone")]  # type: ignore[arg-type]
    together = [call.finished().text for call in b.submit(*requests("batch"))]  # type: ignore[arg-type]
    assert alone == together


def test_tidal_decode_chooses_twice_wherever_there_are_layers_between() -> None:
    assert selecting_layers(32) == (2, 13), "as the paper has it"
    assert selecting_layers(6) == (2, 3)


def test_what_runs_is_told(bench: Make) -> None:
    assert bench(started=False, page_size=16, sparse_decode="quest").engine.stages.describe().kernels == {
        "attention_scores": "pytorch",
        "cached_attention": "pytorch",
        "commit_scores": "pytorch",
        "decode_step": "eager",
        "rope_scatter": "pytorch",
        "sparse_attention": "pytorch",
    }


def test_the_configuration_names_the_builders_that_there_are() -> None:
    assert set(SPARSE_PREFILL) == {"", *PREFILL}
    assert set(SPARSE_DECODE) == {"", *DECODE}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sparse_prefill": "best"}, r"sparse_prefill must be one of .*'query_aware'.*not 'best'"),
        ({"sparse_decode": "segments"}, r"sparse_decode must be one of .*'quest'.*not 'segments'"),
        ({"sparse_density": 0.0}, r"sparse_density must be in \(0, 1\]"),
        ({"sparse_mass": 1.5}, r"sparse_mass must be in \(0, 1\]"),
        ({"sparse_prefill": "segments", "sparse_block": 24}, r"sparse_block must be a power of two .*not 24"),
        ({"sparse_decode": "quest", "page_size": 8}, r"page_size must be a power of two .*not 8"),
    ],
)
def test_wrong_numbers_are_refused_with_what_is_right(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping({"engine": values})


def test_what_a_row_looks_at_by_itself_it_looks_at_beside_a_draft() -> None:
    """Of every builder but those beside which drafts are refused."""
    generator = torch.Generator().manual_seed(0)
    q_RHK, k_LGK = (torch.randn(3, 4, 16, generator=generator), torch.randn(150, 2, 16, generator=generator))

    def looked_at(name: str, first: int, last: int) -> list[Tensor]:
        """Blocks that the rows see that stand at these of the last three positions."""
        at = 147 + torch.arange(first, last)
        length = 147 + last
        rows = Rows(at, length, at + 1, 1, PAGE)
        keys = k_LGK[:length]
        view = View(1, q_RHK[first:last], lambda: keys, lambda: page_bounds(keys, PAGE), rows)
        mask = Selection(name, 0.3, 1.0, 1, PAGE).mask(DECODE[name](view), rows)
        return [(mask & rows.visible())[:, i] for i in range(last - first)]

    differing = set()
    for name in DECODE:
        together = looked_at(name, 0, 3)
        alone = [looked_at(name, i, i + 1)[0] for i in range(3)]
        if not all(torch.equal(a[:, : one.shape[1]], one) for a, one in zip(together, alone, strict=True)):
            differing.add(name)
    assert differing <= {"quest", "random"} and "random" in differing


@pytest.mark.parametrize(
    "engine", [{"kv_bits": 4, "kv_kept": 0.25}, {"sparse_decode": "quest"}, {"sparse_decode": "random"}]
)
def test_drafts_are_refused_where_they_would_have_a_say(
    causal: LoadedModel, bench: Make, engine: dict[str, object]
) -> None:
    b = bench(causal, stages="inline", page_size=16, **engine)
    assert "ngram" not in b.engine.stages.describe().commit_policies
    with pytest.raises(Unimplemented, match="ngram"):
        b.ask(ask("r", "a", commit=Policy(name="ngram")))
    assert b.ask(ask("s", "a", max_new_tokens=4)).text


@pytest.mark.parametrize(
    ("engine", "ahead"),
    [
        ({}, True),
        ({"kv_bits": 4, "kv_kept": 0.25}, False),
        ({"sparse_decode": "quest"}, False),
        ({"sparse_decode": "random"}, False),
        ({"sparse_decode": "tidal"}, True),
    ],
)
@pytest.mark.parametrize("sampling", [ConstraintSampling.MASK, ConstraintSampling.AWRS])
def test_forced_text_is_run_ahead_only_where_rows_have_no_say(
    causal: LoadedModel, bench: Make, engine: dict[str, object], ahead: bool, sampling: ConstraintSampling
) -> None:
    """Then it is a draft as any other: a pass runs one row."""
    spec = dataclasses.replace(causal.spec, end_ids=tiny_model(vision=False).spec.end_ids)
    b = bench(dataclasses.replace(causal, spec=spec), stages="inline", page_size=16, **engine)
    asked = ask("r", "a", max_new_tokens=12, recompute=Policy(name="last"), temperature=1.0)
    done = b.ask(dataclasses.replace(asked, constraint=ConstraintSpec(kind=Regex("abcdef[0-9]gh"), sampling=sampling)))
    assert done.text.startswith("abcdef")
    ran = done.recomputed_tokens - done.usage.prompt_tokens
    assert (ran > done.forwards - 1) == ahead and ran >= done.forwards - 1


def test_a_prefix_cache_beside_sparse_prefill_is_refused_with_what_to_do(causal: LoadedModel, bench: Make) -> None:
    with pytest.raises(ConfigError, match=r"prefix_cache = false"):
        bench(causal, started=False, page_size=16, sparse_prefill="segments")
