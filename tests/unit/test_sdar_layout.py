"""SDAR against transformers' Qwen3 with a block-causal mask and the same weights; its tokens; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tokenizer
from hypothesis import given
from hypothesis import strategies as st
from llama_checkpoints import ROWS, SHAPES, edit, load
from qwen_checkpoints import MASK_ID, block_mask, ids, qwen, save_sdar, store_logits

from mmserve.core.canvas import MASKED, Canvas
from mmserve.decode.recompute.block import Block
from mmserve.errors import ConfigError
from mmserve.models.base import Attention


@pytest.mark.parametrize(("length", "block", "cuts"), [(17, 4, ()), (17, 4, (4, 12)), (22, 8, (8,)), (7, 8, ())])
@pytest.mark.parametrize("heads", SHAPES)
@torch.no_grad()
def test_logits_are_those_of_qwen3_with_a_block_causal_mask(
    tmp_path: Path, heads: str, length: int, block: int, cuts: tuple[int, ...]
) -> None:
    oracle = qwen("qwen3", *SHAPES[heads])
    model = load(save_sdar(oracle, tmp_path, **({"block_size": block} if block != 4 else {})), name="mine")
    rows = ids(length)
    expected = oracle(input_ids=rows, attention_mask=block_mask(length, block).expand(2, -1, -1, -1)).logits
    assert (store_logits(model, rows, cuts) - expected).abs().max() < 1e-4
    spec = model.spec
    assert (spec.name, spec.architecture, spec.attention) == ("mine", "sdar", Attention.BLOCK_CAUSAL)
    assert (spec.causal, spec.logit_shift, spec.block_length(), spec.attention_block) == (False, 0, block, block)
    assert (spec.mask_id, spec.banned_ids, spec.max_tokens) == (MASK_ID, (MASK_ID,), 32_768)
    if length > block:
        causal = oracle(input_ids=rows).logits
        assert (causal - expected).abs().max() > 1e-2, "the mask does matter"


def test_tied_embeddings(tmp_path: Path) -> None:
    oracle = qwen("qwen3", tie_word_embeddings=True)
    model = load(save_sdar(oracle, tmp_path))
    assert model.decoder.head.weight is model.decoder.embed.weight
    with torch.no_grad():
        expected = oracle(input_ids=ids(9), attention_mask=block_mask(9, 4).expand(2, -1, -1, -1)).logits
        assert (store_logits(model, ids(9), ()) - expected).abs().max() < 1e-4


def test_the_mask_may_be_named_by_the_tokenizer_alone(tmp_path: Path) -> None:
    """As the first checkpoints had it: their ``generate.py`` asks the tokenizer."""
    save_sdar(qwen("qwen3"), tmp_path, mask_token_id=None)
    assert load(tmp_path).spec.mask_id == tokenizer().mask_token_id
    edit(tmp_path / "tokenizer_config.json", mask_token=...)
    with pytest.raises(ConfigError, match=r"has no mask_token_id and the tokenizer no <\|MASK\|>"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": ROWS}, f"mask_token_id {ROWS} is no token"),
        ({"block_size": 0}, "block_size must be a positive number, not 0"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"attention_bias": True}, r"no tensor model\.layers\.0\.self_attn\.q_proj\.bias"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_sdar(qwen("qwen3"), tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


# --- the canvas and the recompute policy of block diffusion ---


def aligned(prompt: int, new: int, block: int) -> Canvas:
    return Canvas.create(np.arange(100, 100 + prompt), new_tokens=new, block_length=block, mask_id=3, aligned=True)


@given(st.integers(0, 9), st.integers(1, 24), st.integers(1, 9))
def test_aligned_blocks_are_counted_from_position_0(prompt: int, new: int, block: int) -> None:
    canvas = aligned(prompt, new, block)
    ends = []
    while canvas.block_start < canvas.size:
        here = canvas.block_masked()
        assert here.tolist() == list(range(canvas.block_start, canvas.block_end))
        assert {int(p) // block for p in here} == {canvas.block_start // block}
        ends.append(canvas.block_end)
        canvas.count_forward()
        canvas.commit(here, here)
    assert ends == sorted({min((p // block + 1) * block, canvas.size) for p in range(prompt, canvas.size)})


@given(st.integers(0, 9), st.integers(1, 30), st.integers(1, 9), st.data())
def test_block_reads_only_what_is_final_and_runs_every_mask_of_the_block(
    prompt: int, new: int, block: int, data: st.DataObject
) -> None:
    """K/V of a position depend on what it sees: the row up to its block's end. What is read must have seen that."""
    canvas = aligned(prompt, new, block)
    seen: dict[int, tuple[int, ...]] = {}

    def span(position: int) -> tuple[int, ...]:
        return tuple(canvas.tokens[: (position // block + 1) * block])

    rows = np.arange(canvas.block_end)  # prefill
    while canvas.block_start < canvas.size:
        assert (np.diff(rows) == 1).all()
        assert set(canvas.block_masked().tolist()) <= set(rows.tolist())
        seen |= {int(p): span(int(p)) for p in rows}
        assert all(seen[p] == span(p) for p in range(canvas.block_end))
        canvas.count_forward()
        masked = canvas.block_masked()
        chosen = data.draw(st.permutations(masked.tolist()))[: data.draw(st.integers(1, len(masked)))]
        canvas.commit(np.sort(chosen), 200 + np.sort(chosen))
        rows = Block().rows(canvas)
        assert len(rows) <= 2 * block


def test_block_runs_the_finished_block_once_more() -> None:
    canvas = aligned(6, 8, 4)
    runs = [Block().rows(canvas).tolist()]
    for position in range(6, 13):
        canvas.count_forward()
        canvas.commit(np.array([position]), np.array([7]))
        runs.append(Block().rows(canvas).tolist())
    within = [list(range(8, 12))] * 3
    assert runs == [list(range(8)), [4, 5, 6, 7], list(range(4, 12)), *within, list(range(8, 14)), [12, 13]]
    assert canvas.committed_at[13] == MASKED
