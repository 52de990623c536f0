"""Sequences longer than a checkpoint's: the changed rotary embedding is transformers', and errors name the setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llada_checkpoints
import pytest
import torch
from helpers import ask
from llama_checkpoints import llama, load, our_logits, save

from mmserve.config import EngineConfig, MediaConfig
from mmserve.encode.encoder import Encoder
from mmserve.errors import ConfigError, DoesNotFit
from mmserve.models.dimensions import decoder_config
from mmserve.models.keys import Keys
from mmserve.models.stretch import Stretch
from mmserve.needs import fitted, free_memory

CPU = torch.device("cpu")
KNOWN, MORE = 32, 96
#: What transformers calls the same.
THETA = 50_000.0
SAME: dict[str, dict[str, Any]] = {
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": THETA,
        "factor": MORE / KNOWN,
        "original_max_position_embeddings": KNOWN,
    },
    "ntk": {"rope_type": "default", "rope_theta": THETA * (MORE / KNOWN) ** (8 / (8 - 2))},
}


@pytest.mark.parametrize("method", SAME)
def test_logits_past_the_checkpoints_positions_are_those_of_transformers(method: str, tmp_path: Path) -> None:
    folder = save(llama(max_position_embeddings=KNOWN), tmp_path)
    oracle = llama(max_position_embeddings=MORE, rope_parameters=SAME[method])
    model = load(folder, positions=MORE, rope_scaling=method)
    assert model.spec.max_tokens == MORE
    ids = torch.arange(5, 5 + MORE)[None] % 600
    with torch.no_grad():
        expected = oracle(ids).logits
        ours = our_logits(model, model.decoder.embed(ids))
    assert (ours - expected).abs().max() < 1e-4
    plain = our_logits(load(folder), model.decoder.embed(ids))
    assert (plain - expected).abs().max() > 0.1


def test_a_diffusion_model_of_its_own_layout_is_stretched_too(tmp_path: Path) -> None:
    model = llada_checkpoints.llama(4, 4)
    tensors = {llada_checkpoints.own_name(name): tensor for name, tensor in model.state_dict().items()}
    config = llada_checkpoints.own_config(model, max_sequence_length=KNOWN)
    folder = llada_checkpoints.write(tmp_path, config, tensors)
    made = llada_checkpoints.load(folder, positions=2 * KNOWN, rope_scaling="ntk")
    width, before = made.decoder.config.head_dim, llada_checkpoints.load(folder).decoder.config.rope_theta
    assert made.spec.max_tokens == 2 * KNOWN
    assert made.decoder.config.rope_theta == pytest.approx(before * 2 ** (width / (width - 2)))


def test_fewer_positions_need_no_scaling(tmp_path: Path) -> None:
    model = load(save(llama(max_position_embeddings=KNOWN), tmp_path), positions=20)
    assert model.spec.max_tokens == 20 and model.decoder.config.rope_scaling is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"positions": MORE}, rf"made for {KNOWN} positions, and \[\[models\]\] positions is {MORE}: set rope_scaling"),
        ({"rope_scaling": "yarn"}, "rope_scaling needs positions"),
        ({"positions": MORE, "rope_scaling": "pi"}, "rope_scaling 'pi' is not known; it can be 'ntk' or 'yarn'"),
    ],
)
def test_errors_name_the_setting(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder = save(llama(max_position_embeddings=KNOWN), tmp_path)
    with pytest.raises(ConfigError, match=why):
        load(folder, **options)


def test_a_window_of_all_positions_is_one_again_when_there_are_more(tmp_path: Path) -> None:
    config = {
        "model_type": "mistral",
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": KNOWN,
        "sliding_window": KNOWN,
    }
    made = decoder_config(Keys(config, tmp_path))
    longer = Stretch(MORE, "ntk").applied(made, tmp_path)
    assert (made.plain_attention, made.window(0)) == (True, 0)
    assert (longer.plain_attention, longer.window(0), longer.window(1)) == (False, KNOWN, KNOWN)


@pytest.mark.parametrize("kind", ["mistral", "ministral3", "mixtral", "phi3"])
def test_a_checkpoint_without_a_window_has_none_when_there_are_more_positions(kind: str, tmp_path: Path) -> None:
    config = {
        "model_type": kind,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": KNOWN,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_window": None,
    }
    longer = Stretch(MORE, "ntk").applied(decoder_config(Keys(config, tmp_path)), tmp_path)
    assert longer.plain_attention and longer.max_positions == MORE


def test_yarn_of_a_checkpoint_extends_its_positions(tmp_path: Path) -> None:
    """Qwen's model cards add ``rope_scaling`` alone; fewer positions than they give can be asked for."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": KNOWN}
    values = {"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": yarn, "max_position_embeddings": KNOWN + 8}
    folder = save(llama(), tmp_path, **values)
    assert load(folder).spec.max_tokens == 4 * KNOWN
    assert load(folder, positions=MORE).spec.max_tokens == MORE
    save(llama(), tmp_path, **{**values, "max_position_embeddings": 5 * KNOWN})
    assert load(folder).spec.max_tokens == 5 * KNOWN


def test_a_checkpoint_that_is_stretched_already_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    folder = save(llama(max_position_embeddings=KNOWN, rope_parameters=rope), tmp_path)
    with pytest.raises(ConfigError, match="a scaling or a second base of its own: "):
        load(folder, positions=MORE, rope_scaling="yarn")


def test_requests_are_as_long_as_memory_has_pages_for(tmp_path: Path) -> None:
    model = load(save(llama(max_position_embeddings=512), tmp_path))
    of_a_page = 2 * 3 * 16 * 2 * 8 * 4  # K and V, layers, positions, heads, width, bytes
    whole = fitted(EngineConfig(max_running=3), model, CPU)
    assert (whole.max_tokens, whole.pages) == (512, 3 * 32)
    short = fitted(EngineConfig(kv_share=0.25), model, CPU, free=4 * (10 * of_a_page + of_a_page))
    assert (short.pages, short.max_tokens) == (10, 160)
    asked = fitted(EngineConfig(max_tokens=100, pages=40), model, CPU, free=0)
    assert (asked.max_tokens, asked.pages) == (100, 40)
    assert free_memory(CPU) > 1 << 20


def test_a_prompt_that_is_too_long_names_the_settings(tmp_path: Path) -> None:
    model = load(save(llama(max_position_embeddings=512), tmp_path))
    encoder = Encoder(model, MediaConfig(), max_tokens=24)
    with pytest.raises(
        DoesNotFit, match=r"limit of 24.* \[engine\] max_tokens.* positions and rope_scaling under \[\["
    ):
        encoder.encode([ask("long", "one " * 40, max_new_tokens=4)])
