"""Tiny random checkpoints of text models that are not served, by themselves and within LLaVA, as transformers writes
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers import tokenizer
from llama_checkpoints import HIDDEN, PATCH, PROCESSOR, ROWS, SIDE, edit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from mmserve.models.checkpoint import write_json
from mmserve.reference.tokenizer import BOS, EOS

#: Text models of transformers that resemble LLaMA, or have other experts, norms, positions or orders of layers.
FOREIGN = (
    "cohere",
    "cohere2",
    "deepseek_v3",
    "diffllama",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt_neox",
    "granite",
    "granitemoe",
    "ministral",
    "mixtral",
    "nemotron",
    "olmo",
    "olmo2",
    "phi",
    "phi3",
    "qwen2_moe",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
)
_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": ROWS,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4}
#: Those of ``FOREIGN`` that have experts.
MIXTURES = ("deepseek_v3", "granitemoe", "mixtral", "qwen2_moe", "qwen3_moe")


def text_config(kind: str, **options: Any) -> Any:
    """The configuration of a text model of transformers' ``model_type`` ``kind``."""
    bos, eos = tokenizer().convert_tokens_to_ids([BOS, EOS])
    experts = _EXPERTS if kind in MIXTURES else {}
    return AutoConfig.for_model(
        kind, **{**_SIZES, **experts, "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos, **options}
    )


def alone(kind: str, folder: Path, **options: Any) -> Any:
    """A text model by itself; returns transformers' model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(text_config(kind, **options), attn_implementation="eager").eval()
    return _saved(model, folder)


def within_llava(kind: str, folder: Path) -> Any:
    """The same text model as the decoder of ``llava``; returns transformers' model."""
    torch.manual_seed(0)
    tower = CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )
    write_json(folder / "preprocessor_config.json", {**PROCESSOR, "image_processor_type": "CLIPImageProcessor"})
    image = tokenizer().convert_tokens_to_ids("<image>")
    config = LlavaConfig(vision_config=tower, text_config=text_config(kind), image_token_id=image)
    return _saved(LlavaForConditionalGeneration(config).eval(), folder)


def renamed(folder: Path, kind: str, architecture: str) -> None:
    """Give a checkpoint another ``model_type``: what is served must not depend on tensor names alone."""
    edit(folder / "config.json", model_type=kind, architectures=[architecture])


def _saved(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer().save_pretrained(folder)
    return model
