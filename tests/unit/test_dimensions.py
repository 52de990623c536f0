"""Values of ``config.json`` of a wrong type are refused by name; null values are the defaults of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmserve.errors import ConfigError
from mmserve.models.dimensions import decoder_config
from mmserve.models.keys import Keys

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
WINDOWS = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16}
GEMMA3 = LLAMA | {"model_type": "gemma3_text", "sliding_window": 16}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("given", "windows"),
    [(None, ()), (0, (16,) * 4), (2, (0, 0, 16, 16)), (28, ())],
)
def test_max_window_layers(given: int | None, windows: tuple[int, ...]) -> None:
    assert decoder_config(Keys(WINDOWS | {"max_window_layers": given}, Path("config.json"))).windows == windows


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (WINDOWS | {"max_window_layers": "2"}, "max_window_layers must be a number of layers, not '2'"),
        (WINDOWS | {"max_window_layers": -1}, "max_window_layers must be a number of layers, not -1"),
        (WINDOWS | {"layer_types": 5}, "layer_types must be a list of strings, not 5"),
        (LLAMA | {"layer_types": [[]]}, r"layer_types must be a list of strings, not \[\[\]\]"),
        (LLAMA | {"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number, not inf"),
        (LLAMA | {"rope_theta": float("nan")}, "rope_theta must be a positive number, not nan"),
        (
            LLAMA | {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 1}},
            "original_max_position_embeddings must be at least 2 with longrope, not 1",
        ),
        (
            GEMMA3 | {"rope_parameters": {"full_attention": 5}},
            "rope_parameters.full_attention must be an object, not 5",
        ),
        (
            GEMMA3 | {"rope_parameters": {"full_attention": {}, "sliding_attention": [1]}},
            r"rope_parameters.sliding_attention must be an object, not \[1\]",
        ),
    ],
    ids=lambda value: json.dumps(value)[-60:] if isinstance(value, dict) else "",
)
def test_values_of_a_wrong_type(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder_config(Keys(values, Path("config.json")))
