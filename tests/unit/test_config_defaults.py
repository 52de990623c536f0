"""What a text model's configuration leaves out has the default of transformers' class, or is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from mmserve.errors import ConfigError
from mmserve.models.dimensions import decoder_config
from mmserve.models.keys import Keys

_PATH = Path("config.json")
_CLASSES = (
    *(LlamaConfig, MistralConfig, MixtralConfig, Ministral3Config, Phi3Config, Qwen2Config, Qwen3Config),
    *(Qwen3MoeConfig, Gemma2Config, Gemma3TextConfig),
)
#: What no model has a default for.
_ASKED = {"hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"}


@pytest.mark.parametrize("kind", _CLASSES, ids=lambda kind: kind.model_type)
def test_what_a_configuration_leaves_out_has_the_default_of_its_class(kind: type[Any]) -> None:
    whole = {**kind().to_dict(), "model_type": kind.model_type}
    expected = decoder_config(Keys(whole, _PATH))
    for name in whole.keys() - {"model_type"}:
        rest = {other: value for other, value in whole.items() if other != name}
        try:
            assert decoder_config(Keys(rest, _PATH)) == expected, name
        except ConfigError:
            assert name in {*_ASKED, "rope_parameters"}, name
