"""Fast-dLLM v2 against transformers' Qwen2 with a block-causal mask; its canvas; what is refused."""

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
from qwen_checkpoints import block_mask, ids, qwen, save_fast_dllm, store_logits

from mmserve.core.canvas import Canvas
from mmserve.decode.recompute.block import Block
from mmserve.errors import ConfigError
from mmserve.models.base import Attention


@pytest.mark.parametrize(("length", "block", "cuts"), [(70, 32, (32, 64)), (22, 12, ()), (7, 8, ())])
@pytest.mark.parametrize("heads", SHAPES)
@torch.no_grad()
def test_logits_are_those_of_qwen2_with_a_block_causal_mask(
    tmp_path: Path, heads: str, length: int, block: int, cuts: tuple[int, ...]
) -> None:
    oracle = qwen("qwen2", *SHAPES[heads])
    model = load(save_fast_dllm(oracle, tmp_path, bd_size=block), name="mine")
    rows = ids(length)
    expected = oracle(input_ids=rows, attention_mask=block_mask(length, block).expand(2, -1, -1, -1)).logits
    assert (store_logits(model, rows, cuts) - expected).abs().max() < 1e-4
    spec = model.spec
    assert (spec.name, spec.architecture, spec.attention) == ("mine", "Fast_dLLM_Qwen", Attention.BLOCK_CAUSAL)
    assert (spec.causal, spec.logit_shift, spec.attention_block) == (False, 1, block)
    mask = len(tokenizer())
    assert (spec.mask_id, spec.banned_ids, spec.max_tokens) == (mask, (mask,), 32_768)
    assert spec.block_length() == {32: 8, 12: 4, 8: 8}[block], "sub-blocks are parts of a block"
    assert spec.block_length(2) == 2


def test_tied_embeddings(tmp_path: Path) -> None:
    """As in the 1.5B checkpoint."""
    oracle = qwen("qwen2", tie_word_embeddings=True)
    model = load(save_fast_dllm(oracle, tmp_path))
    assert model.decoder.head.weight is model.decoder.embed.weight
    with torch.no_grad():
        expected = oracle(input_ids=ids(9), attention_mask=block_mask(9, 32).expand(2, -1, -1, -1)).logits
        assert (store_logits(model, ids(9), ()) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": ROWS}, f"mask_token_id {ROWS} is no token"),
        ({"bd_size": 0}, "bd_size must be a positive number, not 0"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types .'sliding_attention'. are not supported"),
        ({"architectures": ["Fast_dLLM_QwenModel"]}, "it can be Fast_dLLM_QwenForCausalLM"),
        ({"num_hidden_layers": 4}, r"no tensor model\.layers\.3\.input_layernorm\.weight"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_fast_dllm(qwen("qwen2"), tmp_path)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


# --- the canvas: parts of a block are filled one after another, its first token is predicted by the block before ---


def parts(prompt: int, new: int, sub: int, block: int, shift: int = 1) -> Canvas:
    return Canvas.create(
        np.arange(100, 100 + prompt),
        new_tokens=new,
        block_length=sub,
        mask_id=3,
        aligned=True,
        logit_shift=shift,
        attention_block=block,
    )


@given(st.integers(1, 9), st.integers(1, 30), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1), st.data())
def test_what_is_read_is_final_and_what_predicts_is_run(
    prompt: int, new: int, sub: int, times: int, shift: int, data: st.DataObject
) -> None:
    """K/V of a position depend on the row up to the end of its block of attention; what is read must have seen that."""
    block = sub * times
    canvas = parts(prompt, new, sub, block, shift)
    seen: dict[int, tuple[int, ...]] = {}

    def span(position: int) -> tuple[int, ...]:
        return tuple(canvas.tokens[: (position // block + 1) * block])

    rows = np.arange(canvas.run_end)
    while canvas.block_start < canvas.size:
        start = canvas.block_start
        assert {int(p) // sub for p in canvas.block_masked()} == {start // sub}
        seen |= {int(p): span(int(p)) for p in rows}
        opens = shift == 1 and start % block == 0 and bool(canvas.masked[start])
        assert (np.diff(rows) == 1).all() and rows[-1] + 1 == canvas.run_end
        assert canvas.run_end == (start if opens else min((start // block + 1) * block, canvas.size))
        assert all(seen[p] == span(p) for p in range(canvas.run_end))
        targets = canvas.block_masked()
        targets = targets[np.isin(targets - shift, rows)]
        assert opens <= (targets.tolist() == [start]), "the first token is predicted before all others"
        canvas.count_forward()
        chosen = data.draw(st.permutations(targets.tolist()))[: data.draw(st.integers(1, len(targets)))]
        canvas.commit(np.sort(chosen), 200 + np.sort(chosen))
        if canvas.block_start < canvas.size:
            rows = Block().rows(canvas)
            assert len(rows) <= 2 * block


def test_block_runs_the_finished_block_alone_for_the_first_token_of_the_next() -> None:
    canvas = parts(6, 12, 2, 4)
    runs = [Block().rows(canvas).tolist()]
    for position in range(6, 17):
        canvas.count_forward()
        canvas.commit(np.array([position]), np.array([7]))
        runs.append(Block().rows(canvas).tolist())
    first, second, third = ([*range(start, start + 4)] for start in (4, 8, 12))
    assert runs == [[*range(8)], *[first] * 2, *[second] * 4, *[third] * 4, [16, 17]]
