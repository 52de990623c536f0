"""Text models that are not implemented are refused, however their tensors are called, and so are keys that change what
a model computes and tensors that nothing uses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_checkpoints import FOREIGN, alone, renamed, within_llava
from llama_checkpoints import edit, llama, load, our_logits, save
from qwen_checkpoints import ids
from safetensors.torch import load_file, save_file

from mmserve.config import ModelConfig
from mmserve.errors import ConfigError
from mmserve.models.registry import sketch_model
from mmserve.models.switches import SWITCHES, TEXT

LLAMA = ("llama", "LlamaForCausalLM")


def check(folder: Path, **options: Any) -> None:
    """What ``mmserve check`` does: everything but reading weights."""
    sketch_model(ModelConfig(path=str(folder), device="cpu", **options))


def extended(folder: Path, **more: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})


#: Kinds that every run tries: those that loaded as LLaMA within LLaVA; the others with `pytest -m slow`.
NEAR_LLAMA = ("diffllama", "ernie4_5", "gemma2", "gemma3_text", "granite", "smollm3")


@pytest.mark.parametrize(
    "kind", [kind if kind in NEAR_LLAMA else pytest.param(kind, marks=pytest.mark.slow) for kind in FOREIGN]
)
def test_a_text_model_that_is_not_implemented_is_refused(tmp_path: Path, kind: str) -> None:
    if kind not in TEXT:
        alone(kind, tmp_path / "alone")
        with pytest.raises(ConfigError, match=f"unknown model_type '{kind}'; known are"):
            check(tmp_path / "alone")
    within_llava(kind, tmp_path / "llava")
    implemented = (
        f"the text model '{kind}' is not implemented, .* implemented are llama, ministral3, mistral, qwen2, qwen3$"
    )
    with pytest.raises(ConfigError, match=implemented):
        check(tmp_path / "llava")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gemma2", {}, "hidden_activation = 'gelu_pytorch_tanh' is not supported"),
        ("gemma2", {"hidden_activation": "silu"}, "attn_logit_softcapping = 50.0 is not supported; it can be None"),
        ("gemma3_text", {}, "hidden_activation = 'gelu_pytorch_tanh' is not supported"),
        ("granite", {}, "attention_multiplier = 1.0 is not supported"),
        ("smollm3", {"num_hidden_layers": 4}, "no_rope_layer_interval = 4 is not supported"),
        ("ministral", {"layer_types": ["sliding_attention"]}, r"layer_types \['sliding_attention'\] are not supported"),
        ("diffllama", {}, "lambda_std_dev = 0.1 is not supported"),
        ("qwen2", {}, r"3 tensors are not used: model\.layers\.0\.self_attn\.k_proj\.bias, "),
        ("qwen3", {}, r"2 tensors are not used: model\.layers\.0\.self_attn\.k_norm\.weight, "),
        ("seed_oss", {}, r"3 tensors are not used|has no tensor model\.layers\.0\.self_attn\.o_proj\.bias"),
    ],
)
def test_a_renamed_model_is_refused_by_what_llama_does_not_have(
    tmp_path: Path, kind: str, options: dict[str, Any], message: str
) -> None:
    """``model_type`` says LLaMA: what differs is named, a key or a tensor."""
    alone(kind, tmp_path, **options)
    renamed(tmp_path, *LLAMA)
    with pytest.raises(ConfigError, match=message):
        check(tmp_path)


def test_each_key_that_changes_the_computation_is_refused_by_name(tmp_path: Path) -> None:
    save(llama(num_hidden_layers=1), tmp_path)
    for name in sorted(SWITCHES):
        edit(tmp_path / "config.json", **{name: "another"})
        with pytest.raises(ConfigError, match=f"{name} = 'another' is not supported"):
            check(tmp_path)
        edit(tmp_path / "config.json", **{name: SWITCHES[name][0]})
    check(tmp_path)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("LlamaForSequenceClassification", "architectures = .* is not served for model_type 'llama'; it can be Llama"),
        ("Gemma2ForCausalLM", r"architectures = \['Gemma2ForCausalLM'\] is not served"),
    ],
)
def test_a_class_that_does_not_generate_text_is_refused(tmp_path: Path, named: str, message: str) -> None:
    save(llama(num_hidden_layers=1), tmp_path, architectures=[named])
    with pytest.raises(ConfigError, match=message):
        check(tmp_path)


def test_a_tensor_that_nothing_uses_is_refused_unless_it_is_named(tmp_path: Path) -> None:
    save(llama(num_hidden_layers=1), tmp_path)
    extended(tmp_path, **{"mtp.layers.0.weight": torch.ones(2), "model.layers.0.self_attn.sinks": torch.ones(4)})
    with pytest.raises(ConfigError, match=r"2 tensors are not used: model\.layers\.0\.self_attn\.sinks, mtp\.layers"):
        check(tmp_path)
    with pytest.raises(ConfigError, match=r"1 tensors are not used: model\.layers\.0\.self_attn\.sinks\. "):
        check(tmp_path, unused_tensors=("mtp.*",))
    check(tmp_path, unused_tensors=("mtp.*", "*.sinks"))


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_model_with_an_output_layer_of_its_own(tmp_path: Path, equal: bool) -> None:
    """As transformers has it: one that equals the embeddings is tied, another is the model's."""
    oracle = llama(num_hidden_layers=1, tie_word_embeddings=True)
    save(oracle, tmp_path)
    head = oracle.lm_head.weight.detach().clone()
    extended(tmp_path, **{"lm_head.weight": head if equal else head.flip(0)})
    model, theirs = load(tmp_path), type(oracle).from_pretrained(tmp_path, attn_implementation="eager")
    assert (model.decoder.head.weight is model.decoder.embed.weight) is equal
    with torch.no_grad():
        assert (our_logits(model, model.decoder.embed(ids())) - theirs(ids()).logits).abs().max() < 1e-4


@pytest.mark.parametrize("window", [12, 24, 400])
def test_mistral_is_served_past_its_window(tmp_path: Path, window: int) -> None:
    options = {"initializer_range": 0.3, "num_hidden_layers": 2, "max_position_embeddings": 300}
    oracle = alone("mistral", tmp_path, sliding_window=window, **options)
    model = load(tmp_path)
    assert model.spec.max_tokens == 300 and model.decoder.config.plain_attention is (window == 400)
    with torch.no_grad():
        assert (our_logits(model, model.decoder.embed(ids(40))) - oracle(ids(40)).logits).abs().max() < 1e-4


def test_every_class_of_llama_that_the_allow_list_names_is_one_of_transformers() -> None:
    import transformers

    from mmserve.models.switches import CLASSES

    own_code = {"Fast_dLLM_Qwen", "diffusionvl_qwenvl", "fast_dvlm"}  # the authors', beside their weights
    names = {name for kind, classes in CLASSES.items() if kind not in own_code for name in classes}
    names -= {"LLaMAForCausalLM"}
    assert all(re.fullmatch(r"\w+For(CausalLM|ConditionalGeneration)", name) for name in names)
    assert all(hasattr(transformers, name) for name in names)
