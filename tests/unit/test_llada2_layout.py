"""LLaDA2.0 against transformers' GLM-4.5 decoder with a block-causal mask and the same weights; what is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from llada2_checkpoints import glm, save
from llama_checkpoints import edit, load
from qwen_checkpoints import MASK_ID, block_mask, ids, store_logits

from mmserve.errors import ConfigError
from mmserve.models.base import Attention
from mmserve.models.moe import MoE, MoEConfig

ALL_EXPERTS = {"n_group": 2, "topk_group": 2, "num_experts_per_tok": 12}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_experts_per_tok": 1, "norm_topk_prob": False},
        {"n_group": 1, "topk_group": 1, "n_shared_experts": 2},
        {"first_k_dense_replace": 0, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        {"first_k_dense_replace": 3, "attention_bias": True},
        ALL_EXPERTS,
    ],
    ids=["as published", "one expert", "one group, two shared", "no dense layer", "dense, biased", "every expert"],
)
@torch.no_grad()
def test_logits_are_those_of_glm_with_a_block_causal_mask(tmp_path: Path, options: dict[str, Any]) -> None:
    oracle = glm(**options)
    for name, parameter in oracle.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    model = load(save(oracle, tmp_path, block_size=4), name="mine")
    expected = oracle(input_ids=ids(18), attention_mask=block_mask(18, 4).expand(2, -1, -1, -1)).logits
    assert (store_logits(model, ids(18), (4, 12)) - expected).abs().max() < 1e-4
    spec = model.spec
    assert (spec.name, spec.architecture, spec.attention) == ("mine", "llada2_moe", Attention.BLOCK_CAUSAL)
    assert (spec.logit_shift, spec.attention_block, spec.mask_id) == (0, 4, MASK_ID)
    edit(tmp_path / "config.json", block_size=...)
    assert load(tmp_path).spec.attention_block == 32


@torch.no_grad()
def test_router_bias_groups_and_scale_do_matter(tmp_path: Path) -> None:
    oracle = glm()
    expected = oracle(input_ids=ids(9), attention_mask=block_mask(9, 4).expand(2, -1, -1, -1)).logits
    for changes in ({"n_group": 1, "topk_group": 1}, {"routed_scaling_factor": 1.0}, {"partial_rotary_factor": 1.0}):
        model = load(save(oracle, tmp_path, block_size=4, **changes))
        assert (store_logits(model, ids(9), ()) - expected).abs().max() > 1e-2, changes
    model = load(save(oracle, tmp_path, block_size=4))
    for moe in (m for m in model.decoder.modules() if isinstance(m, MoE)):
        moe.router.expert_bias.zero_()
    assert (store_logits(model, ids(9), ()) - expected).abs().max() > 1e-2


def test_the_bias_of_the_router_stays_fp32(tmp_path: Path) -> None:
    """In bf16, 0.2001 and 0.2003 are one number: rounded, it would choose other experts."""
    model = load(save(glm(), tmp_path), dtype="bfloat16")
    kinds = {name.rpartition(".")[2]: p.dtype for name, p in model.decoder.named_parameters()}
    assert kinds["expert_bias"] is torch.float32 and kinds["weight"] is torch.bfloat16
    logits = store_logits(model, ids(9), ())
    assert logits.dtype is torch.bfloat16 and logits.isfinite().all()


@torch.no_grad()
def test_a_token_gives_the_same_bits_alone_and_among_others() -> None:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(experts=8, top_k=3, expert_size=64, shared_size=0, groups=2, kept_groups=1), 32).eval()
    x = torch.randn(40, 32)
    splits = ([16, 24], [17, 23], [20, 20])
    moe.row_floor = 16  # on some CPUs an expert with few rows adds in another order
    whole = moe(x)
    for sizes in splits:
        assert torch.equal(torch.cat([moe(piece) for piece in x.split(sizes)]), whole)
    assert torch.equal(moe(x.view(2, 20, 32)).view(40, 32), whole)


def test_the_number_of_rotated_dimensions_may_be_stated_beside_their_share(tmp_path: Path) -> None:
    assert load(save(_oracle(), tmp_path, rotary_dim=6)).decoder.config.rotary_width == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 13}, "13 experts cannot be 4 equal groups"),
        ({"n_group": 12}, "12 experts cannot be 12 equal groups of at least 2"),
        ({"topk_group": 5}, "5 groups cannot be kept of 4"),
        ({"num_experts_per_tok": 7}, "2 groups of 4 do not hold 7 experts"),
        ({"num_experts": 16}, r"no tensor model\.layers\.1\.mlp\.experts\.12\.gate_proj\.weight|gate.weight has shape"),
        ({"first_k_dense_replace": 0}, r"no tensor model\.layers\.0\.mlp\.gate\.weight"),
        ({"first_k_dense_replace": "one"}, "first_k_dense_replace must be a number of layers, not 'one'"),
        ({"partial_rotary_factor": 0.25}, "3 dimensions of 12 cannot be rotated in pairs"),
        ({"rotary_dim": 4}, "rotary_dim = 4 is not supported; it can be 6 or None"),
        ({"num_key_value_heads": 4}, r"query_key_value\.weight has shape \[96, 32\], expected \[144, 32\]"),
        ({"use_bias": ...}, r"no tensor model\.layers\.0\.attention\.dense\.bias"),
        ({"score_function": "softmax"}, "score_function = 'softmax' is not supported"),
        ({"norm_head": True}, "norm_head = True is not supported"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save(_oracle(), tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


_oracle = functools.cache(glm)
