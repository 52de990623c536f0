"""Text models in both layouts against transformers' Llama with the same weights; tokens; export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import helpers
import pytest
import torch
from llada_checkpoints import (
    VOCAB,
    Sighted,
    hf_config,
    ids,
    image,
    llama,
    load,
    open_logits,
    our_logits,
    own_config,
    own_name,
    tokenizer,
    write,
)

from mmserve.errors import ConfigError
from mmserve.models.chat import CHAT_TEMPLATE, TOOLS_TEMPLATE
from mmserve.models.checkpoint import Checkpoint, write_json
from mmserve.models.decoder import Decoder
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.dimensions import decoder_config
from mmserve.models.keys import Keys
from mmserve.models.layouts import HUGGING_FACE, LLADA, Layout, config_json, decoder_tensors
from mmserve.reference.data import pixels_of
from mmserve.reference.export import export
from mmserve.reference.model import VISUAL_TOKENS, ReferenceModel
from mmserve.reference.tokenizer import BOS, EOT, HEADER, HEADER_END, SPECIALS
from mmserve.reference.train import VOCAB_MULTIPLE

SHAPES = {"mha": (4, 4), "gqa": (4, 2)}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("layout", ["llada", "renamed"])
def test_text_models_equal_llama_with_an_open_mask(tmp_path: Path, layout: str, heads: str, sharded: bool) -> None:
    oracle = llama(*SHAPES[heads])
    tensors, config = dict(oracle.state_dict()), hf_config(oracle, model_type="llada")
    if layout == "llada":
        tensors, config = {own_name(name): t for name, t in tensors.items()}, own_config(oracle)
    model = load(write(tmp_path, config, tensors, shard_bytes=20_000 if sharded else None))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == sharded
    difference = our_logits(model, model.decoder.embed(ids())) - open_logits(oracle, oracle.model.embed_tokens(ids()))
    assert difference.abs().max() < 1e-4
    assert model.spec.image_id is None and model.vision is None
    assert (model.spec.mask_id, model.spec.end_ids, model.spec.banned_ids) == (3, {1, 2}, (3,))
    assert model.spec.max_tokens == (4096 if layout == "llada" else 8192)
    assert not model.decoder.training and not any(p.requires_grad for p in model.decoder.parameters())
    assert model.parameters == sum(t.numel() for t in tensors.values())


@pytest.mark.parametrize("layout", ["llada", "renamed"])
def test_biased_and_tied_models(tmp_path: Path, layout: str) -> None:
    oracle = llama(4, 2, attention_bias=True, tie_word_embeddings=True)
    tensors = {name: t for name, t in oracle.state_dict().items() if name != "lm_head.weight"}
    for name, tensor in tensors.items():
        if name.endswith(".bias"):
            torch.nn.init.normal_(tensor) if layout == "renamed" or "o_proj" not in name else tensor.zero_()
    config = hf_config(oracle, model_type="llada", attention_bias=True, tie_word_embeddings=True)
    if layout == "llada":
        tensors = {own_name(name): t for name, t in tensors.items() if "o_proj.bias" not in name}
        config = own_config(oracle, include_qkv_bias=True, weight_tying=True)
    model = load(write(tmp_path, config, tensors))
    assert model.decoder.head.weight is model.decoder.embed.weight
    difference = our_logits(model, model.decoder.embed(ids())) - open_logits(oracle, oracle.model.embed_tokens(ids()))
    assert difference.abs().max() < 1e-4


def test_defaults_of_llada_configuration(tmp_path: Path) -> None:
    config = {"d_model": 32, "n_heads": 4, "n_kv_heads": None, "n_layers": 1, "vocab_size": 64, "mlp_ratio": 3}
    read = decoder_config(Keys(config, tmp_path))
    assert (read.num_kv_heads, read.intermediate_size, read.vocab_size, read.head_dim) == (4, 96, 64, 8)


def test_dtypes(tmp_path: Path) -> None:
    oracle = llama(4, 4).to(torch.bfloat16)
    write(tmp_path, hf_config(oracle), dict(oracle.state_dict()))
    assert Checkpoint.open(tmp_path).dtype() == torch.bfloat16
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = load(tmp_path, dtype=str(dtype).removeprefix("torch."))
        assert model.dtype == dtype == model.decoder.layers[0].q_proj.weight.dtype
        logits = our_logits(model, model.decoder.embed(ids()))
        assert logits.dtype == dtype and logits.isfinite().all()
    assert load(tmp_path, dtype="auto").dtype == torch.float32  # on a CPU
    with pytest.raises(ConfigError, match="dtype 'int3' is not known; it can be 'auto', 'float32'"):
        load(tmp_path, dtype="int3")


def test_tokens_of_llada_v(tmp_path: Path) -> None:
    Sighted(tmp_path, "clip")
    spec = load(tmp_path, name="mine").spec
    bos, eos, eot, mask, header, header_end, picture, _video = (tokenizer().convert_tokens_to_ids(t) for t in SPECIALS)
    assert spec.name == "mine" and spec.architecture == "llava_llada"
    assert (spec.mask_id, spec.image_id, spec.end_ids) == (mask, picture, {eos, eot})
    assert set(spec.banned_ids) == {bos, eos, header, header_end, mask, picture}
    write_json(tmp_path / "generation_config.json", {"suppress_tokens": [bos], "eos_token_id": [eos, eot]})
    assert set(load(tmp_path).spec.banned_ids) == {bos, mask, picture}
    assert load(tmp_path).spec.name == tmp_path.name


def test_tokenizer_without_image_or_fitting_template(tmp_path: Path) -> None:
    Sighted(tmp_path, "clip")
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in data["added_tokens"]:
        token["content"] = token["content"].replace("<image>", "<other>")
    data["model"]["vocab"]["<other>"] = data["model"]["vocab"].pop("<image>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] | trim }}{% endfor %}")
    model = load(tmp_path)
    assert model.spec.image_id == len(tokenizer()) and model.spec.image_id in model.spec.banned_ids
    content = [{"type": "image"}, {"type": "text", "text": "What is left of it? "}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    text = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        f"{BOS}{HEADER}system{HEADER_END}\n\nBe brief.{EOT}"
        f"{HEADER}user{HEADER_END}\n\n<image>\nWhat is left of it?{EOT}"
        f"{HEADER}assistant{HEADER_END}\n\n"
    )
    assert model.tokenizer.encode(text, add_special_tokens=False).count(model.spec.image_id) == 1
    (tmp_path / "chat_template.jinja").unlink()
    assert load(tmp_path).tokenizer.chat_template == model.tokenizer.chat_template
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert load(tmp_path).tokenizer.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize("layout", [LLADA, HUGGING_FACE], ids=lambda layout: layout.name)
@pytest.mark.parametrize("tied", [False, True])
def test_export_and_load_are_inverse(tmp_path: Path, layout: Layout, tied: bool) -> None:
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        rope_theta=12_345.0,
        max_positions=99,
        qkv_bias=layout is LLADA,
        tie_embeddings=tied,
    )
    decoder = Decoder(config)
    values = config_json(layout, config)
    assert decoder_config(Keys(values, tmp_path)) == config
    write(tmp_path, {**values, "eos_token_id": 1}, decoder_tensors(layout, decoder))
    loaded = load(tmp_path).decoder
    assert loaded.config == config
    for (name, ours), (_, theirs) in zip(loaded.named_parameters(), decoder.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.fixture
def tokenizer_at_hand() -> Iterator[None]:
    with helpers.one_tokenizer():
        yield


@pytest.mark.usefixtures("tokenizer_at_hand")
def test_the_trained_model_exports_to_an_ordinary_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(1)
    rows = -(-len(helpers.tokenizer()) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    trained = ReferenceModel(rows, causal=False)
    with pytest.raises(ConfigError, match=r"has no state\.pt: train first"):
        export(tmp_path, tmp_path / "out")
    before = {"recipe": {"steps": 9}, "done": 5, "seconds": 610.0, "before": None}
    recipe = {"objective": "diffusion", "steps": 7}
    machine = {"cpu": "abacus", "torch": "2.0"}
    state = {"recipe": recipe, "done": 7, "seconds": 65.4, "before": before, "machine": machine}
    state["average"] = trained.state_dict()
    torch.save(state, tmp_path / "state.pt")
    export(tmp_path, tmp_path / "out")
    model = load(tmp_path / "out", dtype="bfloat16")
    assert model.vision is not None
    for ours, theirs in (
        (model.decoder, trained.decoder),
        (model.vision.get_submodule("tower"), trained.tower),
        (model.vision.get_submodule("projector"), trained.projector),
    ):
        expected = {
            name: parameter
            for name, parameter in theirs.named_parameters()
            if not name.startswith("encoder.layers.3.")  # behind the selected layer: of no use to who serves it
        }
        assert dict(ours.named_parameters()).keys() == expected.keys()
        for name, parameter in ours.named_parameters():
            assert torch.equal(parameter, expected[name].to(torch.bfloat16)), name
    picture = image(192, 150)
    assert torch.equal(model.vision.prepare(picture)["pixels"][0], pixels_of(picture))
    assert model.vision.tokens_per_image == VISUAL_TOKENS
    bos, eos, eot, mask, header, header_end, placeholder, clip = model.tokenizer.convert_tokens_to_ids(list(SPECIALS))
    spec = model.spec
    assert (spec.mask_id, spec.image_id, spec.end_ids) == (mask, placeholder, {eos, eot})
    assert spec.banned_ids == tuple(sorted((bos, mask, header, header_end, placeholder, clip)))
    assert model.tokenizer.chat_template == TOOLS_TEMPLATE
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert "7 steps in 1 minutes (cpu abacus, torch 2.0). It began with the weights of the run below." in card
    assert "5 steps in 10 minutes.\n\n- steps: 9" in card and "right" not in card
    torch.save(state | {"average": ReferenceModel(rows + 64, causal=False).state_dict()}, tmp_path / "state.pt")
    with pytest.raises(ConfigError, match="do not fit the tokenizer"):
        export(tmp_path, tmp_path / "out")


def test_layouts_refuse_what_they_cannot_say() -> None:
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        qk_norm=True,
    )
    for layout in (LLADA, HUGGING_FACE):
        with pytest.raises(ConfigError, match="no place for"):
            config_json(layout, config)
