"""Dream against transformers' Qwen2 with an open mask and the same weights; its tokens; what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from helpers import tokenizer
from llada_checkpoints import open_logits, our_logits
from llama_checkpoints import ROWS, SHAPES, edit, load
from qwen_checkpoints import IM_END, MASK_ID, MASK_TOKEN, ids, qwen, save_dream, save_tokenizer_as_vocabulary

from mmserve.errors import ConfigError
from mmserve.models.base import Attention
from mmserve.reference.tokenizer import EOS, EOT


@pytest.mark.parametrize("heads", SHAPES)
def test_logits_are_those_of_qwen2_with_an_open_mask(tmp_path: Path, heads: str) -> None:
    oracle = qwen("qwen2", *SHAPES[heads])
    model = load(save_dream(oracle, tmp_path), name="mine")
    rows = ids(17)
    difference = our_logits(model, model.decoder.embed(rows)) - open_logits(oracle, oracle.model.embed_tokens(rows))
    assert difference.abs().max() < 1e-4
    spec = model.spec
    assert (spec.name, spec.architecture, spec.attention) == ("mine", "Dream", Attention.FULL)
    assert (spec.causal, spec.logit_shift, spec.block_length(), spec.block_length(9)) == (False, 1, 32, 9)
    assert (spec.mask_id, spec.banned_ids, spec.max_tokens) == (MASK_ID, (MASK_ID,), 131_072)
    assert spec.image_id is None and model.vision is None


def test_tokens(tmp_path: Path) -> None:
    save_dream(qwen("qwen2"), tmp_path)
    added = save_tokenizer_as_vocabulary(tmp_path)
    model = load(tmp_path)
    assert model.spec.end_ids == {*model.tokenizer.convert_tokens_to_ids([EOS, EOT]), added[IM_END]}
    edit(tmp_path / "config.json", mask_token_id=...)
    spec = load(tmp_path).spec
    assert (spec.mask_id, spec.banned_ids) == (added[MASK_TOKEN], (added[MASK_TOKEN],))
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": [9]}')
    assert load(tmp_path).spec.banned_ids == (9, added[MASK_TOKEN])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": ROWS}, f"mask_token_id {ROWS} is no token"),
        ({"mask_token_id": "<|mask|>"}, r"mask_token_id '<\|mask\|>' is no token"),
        ({"use_mrope": True}, "use_mrope = True is not supported"),
        ({"block_size": 32}, "block_size = 32 is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"num_hidden_layers": 4}, r"no tensor model\.layers\.3\.input_layernorm\.weight"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_dream(qwen("qwen2"), tmp_path)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_mask_must_be_named_somewhere(tmp_path: Path) -> None:
    save_dream(qwen("qwen2"), tmp_path)
    edit(tmp_path / "config.json", mask_token_id=...)
    spec = load(tmp_path).spec
    assert spec.mask_id == tokenizer().mask_token_id
    edit(tmp_path / "tokenizer_config.json", mask_token=...)
    with pytest.raises(ConfigError, match=r"has no mask_token_id and the tokenizer no <\|mask\|>"):
        load(tmp_path)


def test_no_position_is_predicted_from_itself_where_attention_is_causal(tmp_path: Path) -> None:
    spec = load(save_dream(qwen("qwen2"), tmp_path)).spec
    assert dataclasses.replace(spec, attention=Attention.CAUSAL).causal
    with pytest.raises(ValueError, match="cannot be predicted from itself"):
        dataclasses.replace(spec, attention=Attention.CAUSAL, logit_shift=0)
