"""Causal models in both layouts against transformers' Llama with the same weights; tokens; chat formats; export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tokenizer
from llama_checkpoints import ROWS, SHAPES, Sighted, edit, llama, load, our_logits, save, without_special_tokens
from PIL import Image

from mmserve.errors import ConfigError, InvalidArgument
from mmserve.models.base import Attention
from mmserve.models.chat import CHAT_TEMPLATE, TOOLS_TEMPLATE, VICUNA_TEMPLATE, prompt_ids
from mmserve.models.checkpoint import write_checkpoint, write_json
from mmserve.models.decoder import Decoder
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.dimensions import decoder_config
from mmserve.models.keys import Keys
from mmserve.models.layouts import (
    LLAMA,
    LLAVA_LLAMA,
    Layout,
    config_json,
    decoder_tensors,
    vision_tensors,
)
from mmserve.models.vision import LlavaVision
from mmserve.reference.tokenizer import BOS, EOS, EOT, HEADER, HEADER_END, IMAGE, VIDEO

OLD_KEYS: dict[str, Any] = {"rope_parameters": ..., "rope_theta": 50_000.0, "rope_scaling": None}
SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 80,
}
HEADERS = (HEADER, HEADER_END, EOT)


def ids(length: int = 17, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, ROWS, (rows, length), generator=torch.Generator().manual_seed(3))


def difference(folder: Path, oracle: Any) -> float:
    model = load(folder)
    with torch.no_grad():
        return float((our_logits(model, model.decoder.embed(ids())) - oracle(ids()).logits).abs().max())


@pytest.mark.parametrize("keys", [{}, OLD_KEYS], ids=["transformers 5", "transformers 4"])
@pytest.mark.parametrize("heads", SHAPES)
def test_text_models_equal_llama(tmp_path: Path, heads: str, keys: dict[str, Any]) -> None:
    oracle = llama(*SHAPES[heads])
    assert difference(save(oracle, tmp_path, **keys), oracle) < 1e-4
    spec = load(tmp_path, name="mine").spec
    assert (spec.name, spec.architecture, spec.attention) == ("mine", "llama", Attention.CAUSAL)
    assert (spec.causal, spec.logit_shift, spec.block_length(), spec.block_length(8)) == (True, 1, 1, 1)
    assert (spec.image_id, spec.video_id, spec.banned_ids) == (None, None, ())
    assert spec.end_ids == set(tokenizer().convert_tokens_to_ids([EOS, EOT]))
    edit(tmp_path / "config.json", rope_parameters=..., rope_theta=10_000.0)
    assert difference(tmp_path, oracle) > 1e-2, "the rotary base does matter"


@pytest.mark.parametrize(
    "options",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"head_dim": 12},
    ],
    ids=["attention bias", "mlp bias", "all biases, tied", "wide heads"],
)
def test_switches_of_llama(tmp_path: Path, options: dict[str, Any]) -> None:
    oracle = llama(4, 2, **options)
    assert difference(save(oracle, tmp_path), oracle) < 1e-4
    decoder = load(tmp_path).decoder
    assert (decoder.head.weight is decoder.embed.weight) == options.get("tie_word_embeddings", False)


@pytest.mark.parametrize("old", [False, True], ids=["transformers 5", "transformers 4"])
def test_rotation_scaled_as_in_llama_3(tmp_path: Path, old: bool) -> None:
    """Base and context are such that among 8 waves some are kept, some slowed, and some between."""
    base = {"rope_theta": 1_000.0}
    oracle = llama(4, 2, head_dim=16, rope_parameters={**SCALING, **base}, max_position_embeddings=640)
    keys = {"rope_parameters": ..., "rope_scaling": SCALING, **base} if old else {}
    assert difference(save(oracle, tmp_path, **keys), oracle) < 1e-4
    edit(tmp_path / "config.json", **{"rope_parameters": ..., "rope_scaling": None, **base})
    assert difference(tmp_path, oracle) > 1e-2, "the scaling does matter"


@pytest.mark.parametrize("inside", [True, False], ids=["tower in the checkpoint", "tower beside it"])
def test_images_spliced_in_equal_llama_with_the_same_embeddings(tmp_path: Path, inside: bool) -> None:
    made = Sighted(tmp_path, tower_inside=inside)
    model = load(tmp_path)
    assert model.vision is not None and model.vision.tokens_per_image == 16
    image = Image.effect_noise((30, 30), 80).convert("RGB")
    expected = made.visual_tokens(image)
    with torch.no_grad():
        visual = model.vision(model.vision.prepare(image)["pixels"])[0]
        assert (visual - expected).abs().max() < 1e-5
        rows = ids(9, 1)
        ours, theirs = model.decoder.embed(rows), made.oracle.model.embed_tokens(rows)
        ours = torch.cat([ours[:, :4], visual[None], ours[:, 5:]], dim=1)
        theirs = torch.cat([theirs[:, :4], expected[None], theirs[:, 5:]], dim=1)
        assert (our_logits(model, ours) - made.oracle(inputs_embeds=theirs).logits).abs().max() < 1e-4
    spec, placeholder = model.spec, tokenizer().convert_tokens_to_ids(IMAGE)
    assert (spec.architecture, spec.image_id, spec.banned_ids) == ("llava_llama", placeholder, (placeholder,))
    assert spec.causal and not spec.end_ids & set(spec.banned_ids)


def test_a_placeholder_may_lie_behind_the_last_embedding(tmp_path: Path) -> None:
    """LLaVA-1.5 has as many embeddings as its tokenizer has tokens, and no token for an image."""
    rows = len(tokenizer())
    Sighted(tmp_path, rows=rows)
    without_special_tokens(tmp_path, IMAGE, VIDEO)
    model = load(tmp_path)
    assert (model.spec.image_id, model.spec.banned_ids) == (rows, ())
    assert model.tokenizer.encode(f"a{IMAGE}b", add_special_tokens=False).count(rows) == 1
    edit(tmp_path / "config.json", mm_video_frames=2)
    spec = load(tmp_path).spec
    assert (spec.image_id, spec.video_id, spec.banned_ids) == (rows, rows + 1, ())


def test_a_checkpoint_without_a_tower_takes_text(tmp_path: Path) -> None:
    Sighted(tmp_path, mm_vision_tower=None)
    model = load(tmp_path)
    assert model.vision is None and model.spec.image_id is None


def test_tokens_that_end_or_never_come(tmp_path: Path) -> None:
    save(llama(), tmp_path)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [5, 6], "suppress_tokens": [9]})
    spec = load(tmp_path).spec
    eos, turn = tokenizer().convert_tokens_to_ids([EOS, EOT])
    assert (spec.end_ids, spec.banned_ids) == ({5, 6, eos, turn}, (9,))
    (tmp_path / "generation_config.json").unlink()
    edit(tmp_path / "config.json", eos_token_id=...)
    assert load(tmp_path).spec.end_ids == {eos, turn}
    edit(tmp_path / "config.json", max_position_embeddings=300)
    assert load(tmp_path).spec.max_tokens == 300
    edit(tmp_path / "config.json", tokenizer_model_max_length=200)
    assert load(tmp_path).spec.max_tokens == 200


# --- chat formats ---

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it? "}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A circle."}]},
    {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
]
SYSTEM = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}


def rendered(folder: Path, chat: list[dict[str, Any]]) -> str:
    return load(folder).tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_without_a_template_llava_speaks_as_vicuna(tmp_path: Path) -> None:
    """The text is that of LLaVA's own conversation.py for these turns."""
    Sighted(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    without_special_tokens(tmp_path, *HEADERS)
    assert load(tmp_path).tokenizer.chat_template == VICUNA_TEMPLATE
    head = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions. "
    )
    turns = f"USER: <image>\nWhat is it? ASSISTANT: A circle.{EOS}USER: Where? ASSISTANT:"
    assert rendered(tmp_path, CHAT) == BOS + head + turns
    assert rendered(tmp_path, [SYSTEM, *CHAT]) == f"{BOS}Be brief. {turns}"


def test_without_a_template_header_tokens_mean_llama_3(tmp_path: Path) -> None:
    save(llama(), tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert load(tmp_path).tokenizer.chat_template == CHAT_TEMPLATE
    without_special_tokens(tmp_path, *HEADERS)
    with pytest.raises(ConfigError, match=r"has no chat template; put one into chat_template\.jinja"):
        load(tmp_path)


def test_a_checkpoint_s_own_template_is_kept(tmp_path: Path) -> None:
    Sighted(tmp_path)
    assert load(tmp_path).tokenizer.chat_template == TOOLS_TEMPLATE
    own = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}\n{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(own)
    assert load(tmp_path).tokenizer.chat_template.endswith(own)
    expected = "[system] Be brief.\n[user] <image>\nWhat is it?\n[assistant] A circle.\n[user] Where?\n"
    assert rendered(tmp_path, [SYSTEM, *CHAT]) == expected
    plain = [{"role": "user", "content": "text"}]
    assert rendered(tmp_path, plain) == "[user] text\n"
    for useless in ("always the same", "{{ messages[0]['content'] }", "{{ raise_exception('no') }}"):
        (tmp_path / "chat_template.jinja").write_text(useless)
        with pytest.raises(ConfigError, match="the chat template cannot render a user's message"):
            load(tmp_path)


def test_a_chat_that_the_template_refuses_is_the_client_s_mistake(tmp_path: Path) -> None:
    save(llama(), tmp_path)
    own = "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}{{ messages[0]['content'] }}"
    (tmp_path / "chat_template.jinja").write_text(own)
    model = load(tmp_path)
    assert prompt_ids(model.tokenizer, CHAT[2:]) == model.tokenizer.encode("Where?", add_special_tokens=False)
    with pytest.raises(InvalidArgument, match="messages: the model's chat template refuses them: one at a time"):
        prompt_ids(model.tokenizer, CHAT[1:])


# --- export ---


@pytest.mark.parametrize("layout", [LLAMA, LLAVA_LLAMA], ids=lambda layout: layout.name)
@pytest.mark.parametrize("tied", [False, True])
def test_export_and_load_are_inverse(tmp_path: Path, layout: Layout, tied: bool) -> None:
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=ROWS,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        rope_theta=12_345.0,
        max_positions=99,
        qkv_bias=tied,
        out_bias=tied,
        mlp_bias=tied,
        tie_embeddings=tied,
    )
    decoder = Decoder(config)
    values = config_json(layout, config)
    assert decoder_config(Keys(values, tmp_path)) == config
    write_checkpoint(tmp_path, values, decoder_tensors(layout, decoder))
    tokenizer().save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.spec.architecture == layout.name and loaded.spec.causal and loaded.decoder.config == config
    for (name, ours), (_, theirs) in zip(loaded.decoder.named_parameters(), decoder.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_what_was_loaded_exports_to_the_same_tensors(tmp_path: Path) -> None:
    Sighted(tmp_path)
    first = load(tmp_path)
    assert isinstance(first.vision, LlavaVision)
    tower, projector = first.vision.get_submodule("tower"), first.vision.get_submodule("projector")
    tensors = decoder_tensors(LLAVA_LLAMA, first.decoder) | vision_tensors(tower, projector, None)
    config = config_json(LLAVA_LLAMA, first.decoder.config)
    assert config["architectures"] == ["LlavaLlamaForCausalLM"]
    media = {"mm_vision_tower": "vision_tower", "mm_projector_type": "mlp2x_gelu", "image_aspect_ratio": "pad"}
    write_checkpoint(tmp_path, {**config, **media}, tensors)
    second = load(tmp_path)
    assert isinstance(second.vision, LlavaVision)
    for one, two in ((first.decoder, second.decoder), (first.vision, second.vision)):
        # what is exported ends with the layer that is looked at: ``later`` is not there, and `mustdrop` not offered
        expected = {name: each for name, each in one.named_parameters() if not name.startswith("later.")}
        assert expected.keys() == dict(two.named_parameters()).keys()
        for name, parameter in two.named_parameters():
            assert torch.equal(parameter, expected[name]), name
    image = Image.effect_noise((20, 30), 80).convert("RGB")
    assert torch.equal(first.vision.prepare(image)["pixels"], second.vision.prepare(image)["pixels"])


# --- errors ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "ntk", "factor": 8.0}}, "rope_type = 'ntk' is not supported; it can be 'default'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "has no factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0, "x"]}}, "short_factor must be a list of positive"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "1 factors for 4 frequencies"),
        ({"rope_scaling": "llama3"}, "rope_scaling must be an object, not 'llama3'"),
        ({"rope_scaling": {**SCALING, "low_freq_factor": 4.0}}, "low_freq_factor must be below high_freq_factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no low_freq_factor"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"attention_bias": True}, r"no tensor model\.layers\.0\.self_attn\.q_proj\.bias"),
        ({"num_hidden_layers": 4}, r"no tensor model\.layers\.3\.input_layernorm\.weight"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight has shape \[16, 32\], expected \[32, 32\]"),
        ({"hidden_size": ...}, "has no hidden_size"),
        ({"vocab_size": 12}, "the tokenizer has .* tokens, the model embeds only 12"),
        ({"eos_token_id": ROWS}, f"eos_token_id {ROWS} is no token"),
        ({"mm_projector_type": "mlp3x_gelu"}, r"no tensor model\.mm_projector\.4\.weight"),
        ({"image_aspect_ratio": "highres"}, "image_aspect_ratio = 'highres' is not supported"),
        ({"mm_use_im_start_end": True}, "mm_use_im_start_end = True is not supported"),
        ({"model_type": "lava"}, r"unknown model_type 'lava'; known are .*'llama'.*'llava_llama'"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    Sighted(tmp_path)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_no_end_of_text_is_left(tmp_path: Path) -> None:
    save(llama(), tmp_path)
    ends = tokenizer().convert_tokens_to_ids([EOS, EOT])
    write_json(tmp_path / "generation_config.json", {"suppress_tokens": ends})
    with pytest.raises(ConfigError, match="every end of text"):
        load(tmp_path)
    write_json(tmp_path / "generation_config.json", {"suppress_tokens": [ROWS]})
    with pytest.raises(ConfigError, match=f"suppress_tokens {ROWS} is no token"):
        load(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    without_special_tokens(tmp_path, EOT)
    edit(tmp_path / "config.json", eos_token_id=...)
    edit(tmp_path / "tokenizer_config.json", eos_token=...)
    with pytest.raises(ConfigError, match=r"has no eos_token_id and the tokenizer no <\|eot_id\|>"):
        load(tmp_path)
