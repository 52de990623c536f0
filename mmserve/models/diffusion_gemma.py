"""DiffusionGemma (google/diffusiongemma-26B-A4B-it): canvases of random tokens that are denoised and then read.

The network is transformers' own ``DiffusionGemmaForBlockDiffusion``: its encoder reads what is final, causally, into a
cache; its decoder sees that cache and the whole canvas, and is told what it predicted the step before. Layers differ
in head size and look through windows, so its keys and values stay in transformers' own cache, one a request.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

from mmserve.errors import ConfigError
from mmserve.models.base import Attention, CanvasModel, ModelSpec, Renoising
from mmserve.models.chat import adapt_chat_template, load_tokenizer
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.keys import Keys

#: Of ``generation_config.json``, where it does not say (``_get_default_generation_params`` in transformers).
_STEPS, _BOUND, _T_MAX, _T_MIN, _STABLE, _CONFIDENT = 48, 0.1, 0.8, 0.4, 1, 0.005


def load(checkpoint: Checkpoint, target: Target) -> CanvasModel:
    """Load a checkpoint in transformers' layout; raises ``ConfigError`` naming what is wrong. Images are not taken."""
    tokenizer = load_tokenizer(checkpoint.folder)
    adapt_chat_template(tokenizer, checkpoint.folder, images=False, videos=False, vicuna=False)
    try:
        network, report = DiffusionGemmaForBlockDiffusion.from_pretrained(
            checkpoint.folder, dtype=target.dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(f"{checkpoint.folder} cannot be read: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(f"{checkpoint.folder} has no tensor {missing[0]}")
    config = network.config
    if len(tokenizer) > config.text_config.vocab_size:
        raise ConfigError(
            f"{checkpoint.folder}: the tokenizer has {len(tokenizer)} tokens, "
            f"the model embeds only {config.text_config.vocab_size}"
        )
    spec = _spec(checkpoint, config, target.name)
    module = GemmaCanvas(network).to(target.device).eval().requires_grad_(False)
    return CanvasModel(spec, module, tokenizer, target.dtype, target.device)


class GemmaCanvas(nn.Module):
    """transformers' network for one request at a time: what a request gets cannot depend on who else is served."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, and logits of a position."""
        size: int = self.network.config.text_config.vocab_size
        return size

    def read(self, ids_n: Tensor, past: Any | None) -> Any:
        """``past`` (None = nothing yet) with the keys and values of ``ids_n`` (int64), which follow it, added."""
        past = DynamicCache(config=self.network.config.get_text_config(decoder=True)) if past is None else past
        start = past.get_seq_length()
        positions = torch.arange(start, start + len(ids_n), device=ids_n.device)[None]
        return self.network.model.encoder(
            input_ids=ids_n[None], past_key_values=past, position_ids=positions
        ).past_key_values

    def predict(self, canvas_L: Tensor, past: Any, before_LV: Tensor | None) -> Tensor:
        """Logits ``[L, V]`` (fp32) of ``canvas_L`` (int64), which follows ``past``.

        ``before_LV``: the shaped logits of the step before; None at the first.
        """
        start = past.get_seq_length()
        logits: Tensor = self.network(
            decoder_input_ids=canvas_L[None],
            past_key_values=past,
            self_conditioning_logits=None if before_LV is None else before_LV[None],
            decoder_position_ids=torch.arange(start, start + len(canvas_L), device=canvas_L.device)[None],
        ).logits[0]
        return logits


def _spec(checkpoint: Checkpoint, config: Any, name: str) -> ModelSpec:
    text, given = config.text_config, Keys(checkpoint.generation, checkpoint.folder / "generation_config.json")
    ends: set[int] = set()
    for value in (checkpoint.generation.get("eos_token_id"), text.eos_token_id):
        ends |= set(value) if isinstance(value, list) else set() if value is None else {value}
    if not ends:
        raise ConfigError(f"{checkpoint.folder}: neither configuration names an eos_token_id")
    sampler = checkpoint.generation.get("sampler_config") or {}
    return ModelSpec(
        name=name,
        architecture=checkpoint.architecture,
        attention=Attention.FULL,
        mask_id=text.pad_token_id or 0,
        end_ids=frozenset(ends),
        banned_ids=(),
        image_id=None,
        max_tokens=text.max_position_embeddings - config.canvas_length,  # the last canvas is always whole
        default_block_length=config.canvas_length,
        renoising=Renoising(
            steps=given.integer("max_denoising_steps", default=_STEPS),
            bound=float(sampler.get("entropy_bound", _BOUND)),
            t_max=given.number("t_max", default=_T_MAX),
            t_min=given.number("t_min", default=_T_MIN),
            stable=given.integer("stability_threshold", default=_STABLE),
            confident=given.number("confidence_threshold", default=_CONFIDENT),
        ),
    )
