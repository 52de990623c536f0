"""Tiny random checkpoints in the real layouts of LLaMA and LLaVA-1.5, and the transformers models they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from helpers import tokenizer
from torch import Tensor
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

from mmserve.config import ModelConfig
from mmserve.models.base import LoadedModel
from mmserve.models.checkpoint import read_json, write_checkpoint, write_json
from mmserve.models.decoder import dense_attention
from mmserve.models.registry import load_model
from mmserve.reference.tokenizer import BOS, EOS, IMAGE

HIDDEN, SIDE, PATCH = 32, 24, 6
#: Vocabulary rows: more than the tokenizer has tokens, as in most checkpoints.
ROWS = 640
SHAPES = {"mha": (4, 4), "gqa": (4, 2)}


def llama(heads: int = 4, kv_heads: int = 2, **options: Any) -> LlamaForCausalLM:
    """A random Llama whose next token depends on what came before: the initialisation is wide."""
    torch.manual_seed(heads * 10 + kv_heads)
    bos, eos = tokenizer().convert_tokens_to_ids([BOS, EOS])
    values = {
        "hidden_size": HIDDEN,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": ROWS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
        "initializer_range": 0.3,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "attn_implementation": "eager",
    }
    model = LlamaForCausalLM(LlamaConfig(**{**values, **options})).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    return model


def save(oracle: LlamaForCausalLM, folder: Path, **changes: Any) -> Path:
    """A ``llama`` checkpoint as transformers itself writes it, then with ``changes`` (``...`` removes a key)."""
    oracle.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer().save_pretrained(folder)
    edit(folder / "config.json", **changes)
    return folder


def edit(path: Path, **changes: Any) -> None:
    values = {**read_json(path), **changes}
    write_json(path, {key: value for key, value in values.items() if value is not ...})


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(ModelConfig(path=str(folder), **{"dtype": "float32", "device": "cpu", **options}))


def without_special_tokens(folder: Path, *gone: str) -> None:
    """Take special tokens out of a saved tokenizer: they become ordinary words, their ids stay taken."""
    data = (folder / "tokenizer.json").read_text()
    for number, token in enumerate(gone):
        data = data.replace(json.dumps(token), f'"<gone{number}>"')
    (folder / "tokenizer.json").write_text(data)


@torch.no_grad()
def our_logits(model: LoadedModel, embeddings: Tensor) -> Tensor:
    length = embeddings.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    positions = torch.arange(length).expand(embeddings.shape[:2])
    return model.decoder.logits(model.decoder(embeddings, positions, dense_attention(mask, model.decoder.config)))


@torch.no_grad()
def greedy(oracle: LlamaForCausalLM, embeddings: Tensor, count: int, banned: tuple[int, ...] = ()) -> list[int]:
    """What ``generate`` says after ``embeddings [T, D]``, past any end of text."""
    made = oracle.generate(
        inputs_embeds=embeddings[None],
        attention_mask=torch.ones(1, len(embeddings), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
        suppress_tokens=list(banned) or None,
    )
    return [int(token) for token in made[0]]


class Sighted:
    """A LLaVA-1.5 checkpoint on disk (``config.json`` with its keys), and the parts that it was written from."""

    def __init__(
        self,
        folder: Path,
        *,
        tower_inside: bool = True,
        rows: int = ROWS,
        newline: Tensor | None = None,
        **changes: Any,
    ) -> None:
        self.folder, self.oracle = folder, llama(vocab_size=rows)
        torch.manual_seed(7)
        sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
        self.tower = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=SIDE, patch_size=PATCH)).eval()
        self.projector = torch.nn.Sequential(
            torch.nn.Linear(24, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, HIDDEN)
        )
        for linear in (self.projector[0], self.projector[2]):
            torch.nn.init.normal_(linear.weight, std=0.5)
        tensors = dict(self.oracle.state_dict())
        tensors |= {f"model.mm_projector.{name}": t for name, t in self.projector.state_dict().items()}
        tensors |= {} if newline is None else {"model.image_newline": newline}
        vision = {f"vision_model.{name}": t for name, t in self.tower.state_dict().items()}
        if tower_inside:
            tensors |= {f"model.vision_tower.vision_tower.{name}": t for name, t in vision.items()}
        write_checkpoint(folder, {**llava_config(self.oracle), **changes}, tensors, shard_bytes=60_000)
        tokenizer().save_pretrained(folder)
        beside = folder / "vision_tower"
        tower = {"model_type": "clip", "vision_config": self.tower.config.to_dict()}
        write_checkpoint(beside, tower, {} if tower_inside else vision)
        if tower_inside:
            (beside / "model.safetensors").unlink()
        write_json(beside / "preprocessor_config.json", PROCESSOR)

    @torch.no_grad()
    def visual_tokens(self, image: Any) -> Tensor:
        """``[16, D]`` of a square image, by transformers' own processor and tower."""
        pixels = CLIPImageProcessorPil(**PROCESSOR)(image, return_tensors="pt")["pixel_values"]
        return self.projector(self.tower(pixels, output_hidden_states=True).hidden_states[-2][:, 1:])[0]


PROCESSOR: dict[str, Any] = {
    "do_resize": True,
    "size": {"shortest_edge": SIDE},
    "do_center_crop": True,
    "crop_size": {"height": SIDE, "width": SIDE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
    "resample": 3,
}


def llava_config(oracle: LlamaForCausalLM) -> dict[str, Any]:
    """``config.json`` with the keys that ``liuhaotian/llava-v1.5-7b`` has."""
    c = oracle.config
    return {
        "architectures": ["LlavaLlamaForCausalLM"],
        "bos_token_id": c.bos_token_id,
        "eos_token_id": c.eos_token_id,
        "freeze_mm_mlp_adapter": False,
        "freeze_mm_vision_resampler": False,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "image_aspect_ratio": "pad",
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate_size,
        "max_length": 4096,
        "max_position_embeddings": 4096,
        "mm_hidden_size": 24,
        "mm_projector_type": "mlp2x_gelu",
        "mm_resampler_type": None,
        "mm_use_im_patch_token": False,
        "mm_use_im_start_end": False,
        "mm_vision_select_feature": "patch",
        "mm_vision_select_layer": -2,
        "mm_vision_tower": "openai/clip-vit-large-patch14-336",
        "model_type": "llava_llama",
        "num_attention_heads": c.num_attention_heads,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": c.num_key_value_heads,
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": 50_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0",
        "tune_mm_mlp_adapter": False,
        "tune_mm_vision_resampler": False,
        "unfreeze_mm_vision_tower": False,
        "use_cache": True,
        "use_mm_proj": True,
        "vocab_size": c.vocab_size,
    }


def image_id(model: LoadedModel) -> int:
    found = model.tokenizer.convert_tokens_to_ids(IMAGE)
    assert found == model.spec.image_id
    return found
