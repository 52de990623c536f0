"""Keys of rotary embedding that are both within ``rope_parameters`` and beside them are read as transformers does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mmserve.models.keys import Keys
from mmserve.models.rope_keys import read_rope
from mmserve.models.rotary import Rotary

WIDTH = 16
YARN = {"rope_type": "yarn", "factor": 8.0}
SHORT = {"rope_type": "longrope", "short_factor": [1.0 + i for i in range(8)], "long_factor": [9.0] * 8}


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 7_000.0}},
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": YARN, "original_max_position_embeddings": 64},
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 32}, "original_max_position_embeddings": 64},
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 32}},
        {"rope_scaling": SHORT, "original_max_position_embeddings": 64},
        {"rope_scaling": {**SHORT, "original_max_position_embeddings": 32}, "original_max_position_embeddings": 64},
    ],
    ids=str,
)
def test_frequencies_are_those_of_transformers(values: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 4 * WIDTH, "num_attention_heads": 4, "max_position_embeddings": 512}
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(copy.deepcopy({**sizes, **values})))
    positions = torch.arange(40)
    cos, sin = theirs(torch.empty(0), positions[None])
    rope = read_rope(Keys({**sizes, **values}, tmp_path / "config.json"))
    ours = Rotary(WIDTH, rope.theta, rope.scaling).table(positions)
    for mine, expected in zip(ours, (cos, sin), strict=True):
        assert (mine[:, 0] - expected[0]).abs().max() < 1e-5
