"""DiffusionGemma (google/diffusiongemma-26B-A4B-it): canvases of random tokens that are denoised, then prefilled.

The network is transformers' ``DiffusionGemmaForBlockDiffusion``: its encoder prefills final tokens, causally, into a
cache; its decoder attends to that cache and the whole canvas, and gets its own predictions of the previous step. Layers
differ in head size and have sliding windows, so K/V stay in transformers' own cache, one for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling

from mmserve.errors import ConfigError, TransferError
from mmserve.models.base import Attention, CanvasModel, ModelSpec, OpenCanvas, Products, Renoising
from mmserve.models.chat import IMAGE, adapt_chat_template, load_tokenizer
from mmserve.models.checkpoint import GENERATION, Checkpoint, Target
from mmserve.models.gemma_batch import ATTENTION, EXPERTS, NoCache
from mmserve.models.gemma_vision import load_gemma_vision
from mmserve.models.keys import Keys

#: Defaults of ``generation_config.json`` (``_get_default_generation_params`` in transformers).
_STEPS, _BOUND, _T_MAX, _T_MIN, _STABLE, _CONFIDENT = 48, 0.1, 0.8, 0.4, 1, 0.005

#: The argument name of the cache in transformers' forward passes, which changed in 5.24.
_CACHE = "cache" if "cache" in signature(DiffusionGemmaForBlockDiffusion.forward).parameters else "past_key_values"

#: Maximum canvases of a pass: each has logits for every position, in addition to the previous step's result.
_AT_ONCE = 8


def load(checkpoint: Checkpoint, target: Target) -> CanvasModel:
    """Load a checkpoint in transformers' layout; raises ``ConfigError`` naming what is wrong.

    Supports images if the checkpoint has settings of an image processor.
    """
    if checkpoint.stretch.positions:
        raise ConfigError(
            f"{checkpoint.folder}: [[models]] positions of {checkpoint.architecture!r} are the checkpoint's"
        )
    if checkpoint.weights.form:
        raise ConfigError(f"{checkpoint.folder}: quantised weights of {checkpoint.architecture!r} are not read")
    bound = _bound(checkpoint)  # before transformers reads it, without names in its errors
    tokenizer = load_tokenizer(checkpoint.folder)
    try:
        network, report = DiffusionGemmaForBlockDiffusion.from_pretrained(
            checkpoint.folder,
            dtype=target.dtype,
            local_files_only=True,
            output_loading_info=True,
            attn_implementation={"text_config": ATTENTION},
            experts_implementation=EXPERTS if target.device.type == "cpu" else None,
        )
    except (AssertionError, OSError, RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(f"{checkpoint.folder} cannot be read: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(f"{checkpoint.folder} has no tensor {missing[0]}")
    checkpoint.weights.refuse(sorted(set(report["unexpected_keys"]) - checkpoint.weights.read))
    config = network.config
    if len(tokenizer) > config.text_config.vocab_size:
        raise ConfigError(
            f"{checkpoint.folder}: the tokenizer has {len(tokenizer)} tokens, "
            f"the model embeds only {config.text_config.vocab_size}"
        )
    module = GemmaCanvas(network).to(target.device).eval().requires_grad_(False)
    vision = load_gemma_vision(checkpoint.folder, network.model.encoder)
    image = tokenizer.convert_ids_to_tokens(config.image_token_id) if vision is not None else IMAGE
    adapt_chat_template(
        tokenizer, checkpoint.folder, images=vision is not None, videos=False, vicuna=False, image=image
    )
    spec = _spec(checkpoint, config, target.name, bound, images=vision is not None)
    return CanvasModel(spec, module, tokenizer, target.dtype, target.device, vision)


class GemmaCanvas(nn.Module):
    """transformers' network; a request's result does not depend on other requests.

    On the CPU that includes the last bits: no matrix product has fewer than ``row_floor`` rows.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.set_row_floor(1)

    def products(self) -> Products:
        """The linear layers of canvases, the experts, and the embedding of the previous step's result."""
        found: dict[tuple[int, int], Callable[[Tensor], Tensor]] = {}
        embed = self.network.model.decoder.embed_tokens.weight
        found[embed.shape[0], embed.shape[1]] = lambda x: x @ embed
        for module in (*self.network.model.decoder.modules(), self.network.lm_head):
            if isinstance(module, nn.Linear):
                found[module.in_features, module.out_features] = module
        for layer in self.network.model.decoder.layers:
            for weight in (layer.experts.gate_up_proj[0], layer.experts.down_proj[0]):
                found[weight.shape[1], weight.shape[0]] = partial(F.linear, weight=weight)
        return [(width, product) for (width, _out), product in found.items()]

    def set_row_floor(self, rows: int) -> None:
        """See ``CanvasNetwork``: canvases are repeated, and experts' rows padded with zeros, to the minimum."""
        self._floor = rows
        for layer in (*self.network.model.decoder.layers, *self.network.model.encoder.language_model.layers):
            layer.experts.row_floor = rows

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of embeddings and logits."""
        size: int = self.network.config.text_config.vocab_size
        return size

    @property
    def width(self) -> int:
        """Embedding size."""
        size: int = self.network.config.text_config.hidden_size
        return size

    def read(self, ids_n: Tensor, past: Any | None, features: Tensor | None = None) -> Any:
        """``past`` (None = empty) extended by the keys and values of ``ids_n`` (int64), which follow it.

        ``features``: the visual tokens ``[n, D]`` at the image placeholders. If configured so, those of one image
        attend to each other; transformers' forward pass leaves that to its caller.
        """
        past = DynamicCache(config=self.network.config.get_text_config(decoder=True)) if past is None else past
        start = past.get_seq_length()
        positions = torch.arange(start, start + len(ids_n), device=ids_n.device)[None]
        seen: dict[str, Any] = {_CACHE: past}
        if features is not None:
            seen["mm_encoder_outputs"] = {"image": BaseModelOutputWithPooling(pooler_output=features)}
            seen["attention_mask"] = self.network.model.encoder.create_masks_for_generate(
                config=self.network.config,
                inputs_embeds=features.new_empty(1, len(ids_n), 0),
                attention_mask=None,
                position_ids=positions,
                mm_token_type_ids=(ids_n == self.network.config.image_token_id).long()[None],
                **{_CACHE: past},
            )
        self.network.model.encoder(input_ids=ids_n[None], position_ids=positions, **seen)  # extends ``past``
        return past

    def predict(self, canvases: list[OpenCanvas]) -> list[Tensor]:
        """Logits ``[L, V]`` (fp32) of each canvas; the number of canvases in one pass is limited by memory."""
        return [
            logits for i in range(0, len(canvases), _AT_ONCE) for logits in self._predict(canvases[i : i + _AT_ONCE])
        ]

    def held(self, past: Any) -> dict[str, Tensor]:
        """See ``CanvasNetwork``: ``[1, G, n, K]`` for each layer; in layers with a window only its positions."""
        layers = enumerate(past.layers)
        return {f"{name}.{i}": getattr(layer, name) for i, layer in layers for name in ("keys", "values")}

    def past_of(self, held: Mapping[str, Tensor], positions: int) -> Any:
        """See ``CanvasNetwork``."""
        past = DynamicCache(config=self.network.config.get_text_config(decoder=True))
        names = {f"{name}.{i}" for i in range(len(past.layers)) for name in ("keys", "values")}
        if names != set(held):
            raise TransferError(f"the K/V of {len(held) // 2} layers came, and this model has {len(past.layers)}")
        for i, layer in enumerate(past.layers):
            keys, values = held[f"keys.{i}"], held[f"values.{i}"]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = positions
        return past

    def _predict(self, canvases: list[OpenCanvas]) -> list[Tensor]:
        length, count = len(canvases[0].tokens_L), len(canvases)
        padded = [*canvases, *canvases[:1] * (-(-self._floor // length) - count)]
        given = [canvas.before_LV for canvas in padded]
        known = next((before for before in given if before is not None), None)
        starts = torch.tensor([canvas.past.get_seq_length() for canvas in padded], device=padded[0].tokens_L.device)
        hidden_BLD = self.network.model.decoder(
            decoder_input_ids=torch.stack([canvas.tokens_L for canvas in padded]),
            self_conditioning_logits=None
            if known is None
            else torch.stack([torch.zeros_like(known) if before is None else before for before in given]),
            self_conditioning_mask=torch.tensor([before is not None for before in given], device=starts.device),
            decoder_position_ids=starts[:, None] + torch.arange(length, device=starts.device),
            pasts=[canvas.past for canvas in padded],
            **{_CACHE: NoCache(canvases[0].past, len(padded))},
        ).last_hidden_state
        return [self._logits(hidden_LD) for hidden_LD in hidden_BLD[:count]]

    def _logits(self, hidden_LD: Tensor) -> Tensor:
        """As in ``DiffusionGemmaForBlockDiffusion``, one canvas at a time."""
        cap = self.network.final_logit_softcapping
        rows = F.pad(hidden_LD, (0, 0, 0, -len(hidden_LD) % self._floor))
        logits: Tensor = self.network.lm_head(rows)[: len(hidden_LD)].float()
        return torch.tanh(logits / cap) * cap


def _spec(checkpoint: Checkpoint, config: Any, name: str, bound: float, *, images: bool) -> ModelSpec:
    text, given = config.text_config, Keys(checkpoint.generation, checkpoint.folder / GENERATION)
    ends: set[int] = set()
    for value in (checkpoint.generation.get("eos_token_id"), text.eos_token_id):
        ends |= set(value) if isinstance(value, list) else set() if value is None else {value}
    if not ends:
        raise ConfigError(f"{checkpoint.folder}: neither configuration names an eos_token_id")
    return ModelSpec(
        name=name,
        architecture=checkpoint.architecture,
        attention=Attention.FULL,
        mask_id=text.pad_token_id or 0,
        end_ids=frozenset(ends),
        banned_ids=(),
        image_id=config.image_token_id if images else None,
        max_tokens=text.max_position_embeddings - config.canvas_length,  # the last canvas is always complete
        default_block_length=config.canvas_length,
        renoising=Renoising(
            steps=given.integer("max_denoising_steps", default=_STEPS),
            bound=bound,
            t_max=given.number("t_max", default=_T_MAX),
            t_min=given.number("t_min", default=_T_MIN, zero=True),
            stable=given.integer("stability_threshold", default=_STABLE, zero=True),
            confident=given.number("confidence_threshold", default=_CONFIDENT),
        ),
    )


def _bound(checkpoint: Checkpoint) -> float:
    """The bound of the sampler in the generation settings; raises ``ConfigError``."""
    path, values = checkpoint.folder / GENERATION, checkpoint.generation.get("sampler_config") or {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: sampler_config must be an object, not {values!r}")
    sampler = Keys(values, path)
    sampler.check({"_cls_name": ("EntropyBoundSamplerConfig", None)})
    return sampler.number("entropy_bound", default=_BOUND)
