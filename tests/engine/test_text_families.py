"""Text models that differ from LLaMA in windows, experts, rotations, caps or norms: logits and answers are
transformers' own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Bench
from helpers import ask
from llama_checkpoints import edit, greedy, load, our_logits
from qwen_checkpoints import ids, store_logits
from safetensors.torch import load_file, save_file
from test_causal_engine import LAST, NONE, answer, endless
from text_checkpoints import CASES, LENGTH, oracle, save

from mmserve.core.request import Policy
from mmserve.errors import ConfigError, Unimplemented
from mmserve.models.base import LoadedModel

Make = Callable[..., Bench]
NEW = 10


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    made = oracle(request.param)
    return made, load(save(made, tmp_path_factory.mktemp("model")))


@torch.no_grad()
def test_logits_equal_transformers(pair: tuple[Any, LoadedModel]) -> None:
    """Through the paged store in one pass and in three, and over a dense batch; transformers' are of float64."""
    theirs, model = pair
    rows, exact = ids(LENGTH), copy.deepcopy(theirs).double()
    if hasattr(exact.config, "_experts_implementation"):
        exact.config._experts_implementation = "eager"  # grouped products take no float64
    expected = exact(rows).logits
    assert (store_logits(model, rows, (7, 26)) - expected).abs().max() < 1e-4
    assert (store_logits(model, rows, ()) - expected).abs().max() < 1e-4
    assert (our_logits(model, model.decoder.embed(rows)) - expected).abs().max() < 1e-4
    assert expected.std() > 0.1


def test_answers_equal_transformers_alone_and_together(pair: tuple[Any, LoadedModel], bench: Make) -> None:
    theirs, model = pair
    texts = ("a red circle", "what is left of it? " * 4, "?")
    b = bench(endless(model), stages="inline")
    expected = []
    for text in texts:
        [prompt] = b.engine.stages.encoder.encode([ask("x", text)])
        with torch.no_grad():
            embedded = theirs.get_input_embeddings()(torch.from_numpy(prompt.ids))
            expected.append(greedy(theirs, embedded, NEW))
    asked = [ask(t, t, max_new_tokens=NEW, recompute=NONE if t == "?" else LAST) for t in texts]
    assert [answer(b, call) for request in asked for call in b.submit(request)] == expected
    together = bench(endless(model))
    assert [answer(together, call) for call in together.submit(*asked)] == expected


def test_what_is_refused_where_layers_see_windows(tmp_path: Path, bench: Make) -> None:
    model = load(save(oracle("mistral window"), tmp_path))
    refused = "some of its layers see a sliding window"
    with pytest.raises(ConfigError, match=rf"sparse_\* is not implemented for model .*: {refused}"):
        bench(model, sparse_decode="quest")
    running = bench(model)
    assert running.engine.stages.capabilities.describe({}).kv_reductions == ()
    with pytest.raises(Unimplemented, match=f"reduces no K/V: {refused}"):
        running.submit(
            replace(ask("r", recompute=LAST), kv_reduction=Policy(name="heavy_hitters", options={"budget": 8}))
        )


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation = 'silu' is not supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        ("gemma3_text", {"architectures": ["Gemma3TextModel"]}, "is not served for model_type 'gemma3_text'"),
        ("mixtral", {"num_local_experts": 7}, r"has no tensor .*experts\.6\.w1|gate\.weight has shape"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"has no tensor model\.layers\.0\.mlp\.gate_proj\.weight"),
        ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers must be a list of layers, not 'all'"),
        ("phi3", {"num_key_value_heads": 4}, r"qkv_proj\.weight has shape \[64, 32\], expected \[96, 32\]"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(save(oracle(case), tmp_path, **changes))


@torch.no_grad()
def test_windows_caps_and_experts_do_matter(tmp_path: Path) -> None:
    for case, changes in (
        ("mistral window", {"sliding_window": 30}),
        ("gemma2", {"attn_logit_softcapping": 50.0}),
        ("gemma2", {"query_pre_attn_scalar": 16}),
        ("gemma3_text", {"sliding_window": 13}),
        ("mixtral", {"num_experts_per_tok": 2}),
        ("qwen3_moe", {"norm_topk_prob": False}),
    ):
        made = oracle(case)
        model = load(save(made, tmp_path / case / str(changes), **changes))
        assert (store_logits(model, ids(LENGTH), ()) - made(ids(LENGTH)).logits).abs().max() > 1e-2, case


@torch.no_grad()
def test_nemotron_labs_diffusion_is_ministral_token_by_token(tmp_path: Path, bench: Make) -> None:
    """With the names of ``nvidia/Nemotron-Labs-Diffusion-8B``'s tensors."""
    made = oracle("ministral3")
    save(made, tmp_path, model_type="nemotron_labs_diffusion", architectures=["NemotronLabsDiffusionModel"])
    file = tmp_path / "model.safetensors"
    names = {"lm_head.weight": "diffusion_head.weight"}
    tensors = {names.get(n, n.replace("model.", "encoder.", 1)): t for n, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    edit(tmp_path / "config.json", mask_token_id=100, dlm_paradigm="block_diff", block_size=32, ar_loss_weight=1.0)
    model = load(tmp_path)
    assert (store_logits(model, ids(LENGTH), (9,)) - made(ids(LENGTH)).logits).abs().max() < 1e-4
    assert model.spec.causal and model.spec.max_tokens == 80
