"""Checkpoints that cannot be served, each with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llada_checkpoints import VOCAB, Sighted, edit, hf_config, llama, load, own_config, own_name, tokenizer, write

from mmserve.config import ModelConfig
from mmserve.errors import ConfigError
from mmserve.models import names, towers
from mmserve.models.checkpoint import read_json, write_json
from mmserve.models.llada import MASK
from mmserve.models.registry import load_model
from mmserve.reference.tokenizer import EOS, EOT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            r"unknown model_type 'gpt2'; known are .*'llada', 'llada2_moe', 'llada_moe', 'llama', .*'llava_llada'",
        ),
        ({"model_type": ...}, "no model_type"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; it can be 'silu'"),
        ({"rope_scaling": {"type": "linear"}}, "has no factor"),
        ({"rope_parameters": {"rope_type": "ntk"}}, "rope_type = 'ntk'"),
        ({"hidden_size": ...}, "has no hidden_size"),
        ({"hidden_size": "32"}, "hidden_size must be a positive number, not '32'"),
        ({"hidden_size": True}, "hidden_size must be a positive number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive number, not 0"),
        ({"num_attention_heads": 5}, "does not divide into 5 heads"),
        ({"num_key_value_heads": 3}, "cannot share 3 key/value heads"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"vocab_size": 12}, "the tokenizer has .* tokens, the model embeds only 12"),
        ({"mask_token_id": VOCAB}, f"mask_token_id {VOCAB} is no token"),
        ({"eos_token_id": "one"}, "eos_token_id 'one' is no token"),
        (
            {"intermediate_size": 64},
            r"model\.layers\.0\.mlp\.gate_proj\.weight has shape \[56, 32\], expected \[64, 32\]",
        ),
        ({"num_hidden_layers": 4}, r"index\.json has no tensor model\.layers\.3\.input_layernorm\.weight"),
        ({"mm_projector_type": "mlp2x_res2x_gelu"}, "mm_projector_type = 'mlp2x_res2x_gelu' is not supported"),
        ({"mm_projector_type": "mlp3x_gelu"}, r"no tensor model\.mm_projector\.4\.weight"),
        ({"image_aspect_ratio": "anyres_max_4"}, "'anyres_max_4' needs mm_patch_merge_type = 'spatial_unpad'"),
        ({"mm_patch_merge_type": "unpad"}, "mm_patch_merge_type = 'unpad' is not supported"),
        ({"mm_vision_select_feature": "cls"}, "mm_vision_select_feature = 'cls'"),
        ({"mm_vision_select_layer": 9}, "mm_vision_select_layer = 9 is not one of the tower's 3 layers"),
        ({"mm_resampler_type": "perceiver"}, "mm_resampler_type = 'perceiver'"),
        ({"mm_vision_tower": 5}, "mm_vision_tower must be a string"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    Sighted(tmp_path, "clip")
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_type": "swiglu"}, "activation_type = 'swiglu' is not supported; it can be 'silu'"),
        ({"block_type": "sequential"}, "block_type = 'sequential'"),
        ({"layer_norm_type": "default"}, "layer_norm_type"),
        ({"alibi": True}, "alibi = True"),
        ({"include_bias": True}, "include_bias = True"),
        ({"scale_logits": True}, "scale_logits"),
        ({"multi_query_attention": True}, "multi_query_attention"),
        ({"n_layers": ...}, "has no n_layers"),
        ({"mask_token_id": -1}, "mask_token_id -1 is no token"),
        ({"weight_tying": 3}, "weight_tying must be true or false"),
    ],
)
def test_own_configurations_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    oracle = llama(4, 4)
    write(tmp_path, own_config(oracle), {own_name(n): t for n, t in oracle.state_dict().items()})
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_files_that_are_missing_or_wrong(tmp_path: Path) -> None:
    made = Sighted(tmp_path, "clip")
    tower = tmp_path / "vision_tower"
    tower_json, processor = read_json(tower / "config.json"), read_json(tower / "preprocessor_config.json")
    for values, message in (
        ({**tower_json, "model_type": "dinov2"}, "unknown vision tower model_type 'dinov2'; known are"),
        ({**tower_json, "hidden_size": 26}, "has shape .* expected"),
        ({**tower_json, "hidden_size": "wide"}, r"vision_tower/config\.json"),
        ({**tower_json, "image_size": 30}, r"makes images of \(24, 24\), but the tower takes 30 x 30|has shape"),
    ):
        write_json(tower / "config.json", values)
        with pytest.raises(ConfigError, match=message):
            load(tmp_path)
    write_json(tower / "config.json", tower_json)
    write_json(tower / "preprocessor_config.json", {**processor, "crop_size": {"height": 20, "width": 20}})
    with pytest.raises(ConfigError, match=r"makes images of \(20, 20\), but the tower takes 24 x 24"):
        load(tmp_path)
    (tower / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json"):
        load(tmp_path)
    write_json(tower / "preprocessor_config.json", processor)
    made.rewrite(without="class_embedding")
    with pytest.raises(
        ConfigError, match=r"no tensor model\.vision_tower\.vision_tower\.vision_model\.embeddings\.class"
    ):
        load(tmp_path)
    made.rewrite(without="encoder.layers.1.")
    with pytest.raises(ConfigError, match=r"no tensor .*encoder\.layers\.1\."):
        load(tmp_path)
    made.rewrite()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="the tokenizer cannot be read"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load(tmp_path)


def test_missing_mask(tmp_path: Path) -> None:
    oracle = llama(4, 4)
    write(tmp_path, hf_config(oracle, model_type="llada"), dict(oracle.state_dict()))
    text = (tmp_path / "tokenizer.json").read_text().replace(MASK, "<|nothing|>")
    (tmp_path / "tokenizer.json").write_text(text)
    edit(tmp_path / "tokenizer_config.json", mask_token=...)
    with pytest.raises(ConfigError, match=r"no mask_token_id and the tokenizer no <\|mdm_mask\|>"):
        load(tmp_path)


def test_every_end_banned(tmp_path: Path) -> None:
    oracle = llama(4, 4)
    write(tmp_path, hf_config(oracle), dict(oracle.state_dict()))
    write_json(tmp_path / "generation_config.json", {"suppress_tokens": tokenizer().convert_tokens_to_ids([EOS, EOT])})
    with pytest.raises(ConfigError, match="every end of text"):
        load(tmp_path)


def test_where_a_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"no model directory .*nothing; bundled and bundled-causal come .*hub:owner/name"
    ):
        load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="device 'tpu9' is not known"):
        load(tmp_path, device="tpu9")
    with pytest.raises(ConfigError, match="device 'cuda:99' is not available"):
        load(tmp_path, device="cuda:99")
    with pytest.raises(ConfigError, match="cannot fetch"):
        load_model(ModelConfig(path="hub:not a/valid/name"))
    monkeypatch.setattr(names, "__file__", str(tmp_path / "mmserve" / "models" / "names.py"))
    with pytest.raises(ConfigError, match="no model 'bundled'; name a checkpoint directory or hub:"):
        load_model(ModelConfig())


def test_the_hub_is_asked_only_for_hub_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tower = tmp_path / "model", tmp_path / "tower"
    Sighted(model, "siglip", mm_vision_tower="someone/siglip")
    (model / "vision_tower").rename(tower)
    asked: list[tuple[str, bool]] = []

    def snapshot(repository: str, *, allow_patterns: list[str]) -> str:
        asked.append((repository, "*.safetensors" in allow_patterns))
        return str({"someone/model": model, "someone/siglip": tower}[repository])

    monkeypatch.setattr(towers, "snapshot_download", snapshot)
    with pytest.raises(ConfigError, match="put a copy"):
        load(model)
    assert asked == []
    loaded = load("hub:someone/model")
    assert asked == [("someone/model", True), ("someone/siglip", False)]
    assert loaded.spec.name == "model" and loaded.vision is not None
