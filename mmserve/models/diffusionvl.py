"""DiffusionVL (arXiv 2512.15713; hustvl/DiffusionVL): ``hustvl/DiffusionVL-Qwen2.5VL-*``.

Block diffusion, derived from Qwen2.5-VL in LLaVA's layout: its tower, with the merger as a projector, and its decoder,
with blocks counted from the start of the sequence. Positions are one-dimensional, also for visual tokens, and the
logits of a row predict its own position. Images only, as in the authors' code.
"""

from __future__ import annotations

from dataclasses import replace

from mmserve.core.request import PixelRange
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.chat import IMAGE, adapt_chat_template, load_tokenizer
from mmserve.models.checkpoint import CONFIG, Checkpoint, Target
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.dimensions import decoder_config
from mmserve.models.family import Sources, check_vocabulary, load_decoder, make_spec, placeholder
from mmserve.models.keys import Keys
from mmserve.models.layouts import HUGGING_FACE, NEWLINE, PROJECTOR, TOWER
from mmserve.models.nested import use_processor_template
from mmserve.models.qwen25_vision import Qwen25Vision
from mmserve.models.qwen_pixels import load_pixels
from mmserve.models.qwen_vl import KINDS, check_width, flat, load_tower, tower_config

#: The mask token in the authors' code; it is in no configuration or tokenizer.
MASK_ID = 151_671


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load the layout; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    checkpoint = flat(checkpoint)
    keys = Keys(checkpoint.config, checkpoint.folder / CONFIG)
    keys.check({"enable_bd3lm": (True, None), "hidden_act": ("silu", None), "mm_use_im_start_end": (False, None)})
    # All axes of M-RoPE have the same position here, so that it is the plain rotary embedding.
    config = checkpoint.stretch.applied(replace(decoder_config(keys), rope_axes=()), keys.path)
    sources = _sources(checkpoint, target, keys, config)
    spec = make_spec(
        sources,
        attention=Attention.BLOCK_CAUSAL,
        mask_id=keys.integer("mask_token_id", default=MASK_ID),
        block_length=keys.integer("bd3lm_block_size"),
    )
    decoder = load_decoder(checkpoint, config, target, HUGGING_FACE)
    vision = _vision(checkpoint, target, keys, config)
    checkpoint.weights.ignore(NEWLINE)  # of other towers
    checkpoint.weights.check_all_read()
    return LoadedModel(spec, decoder, sources.tokenizer, vision.eval(), target.dtype, target.device)


def _sources(checkpoint: Checkpoint, target: Target, keys: Keys, config: DecoderConfig) -> Sources:
    tokenizer = load_tokenizer(checkpoint.folder)
    use_processor_template(tokenizer, checkpoint.folder)
    adapt_chat_template(tokenizer, checkpoint.folder, images=True, videos=False, vicuna=False)
    check_vocabulary(checkpoint, tokenizer, config)
    return Sources(
        checkpoint=checkpoint,
        keys=keys,
        config=config,
        tokenizer=tokenizer,
        name=target.name,
        image_id=placeholder(tokenizer, IMAGE),
        video_id=None,
    )


def _vision(checkpoint: Checkpoint, target: Target, keys: Keys, config: DecoderConfig) -> Qwen25Vision:
    kind = KINDS["qwen2_5_vl"]
    tower = tower_config(checkpoint, kind)
    check_width(keys, tower, kind, config)
    made = load_tower(checkpoint, kind, tower, _tensor, target)
    pixels = load_pixels(checkpoint.folder, tower, together=False)
    given = (keys.integer(n) if keys.values.get(n) is not None else None for n in ("min_pixels", "max_pixels"))
    # as in the authors' tower, these keys have priority over the image processor's
    return Qwen25Vision(made, pixels.within(PixelRange(*given), PixelRange()), frames=0)


def _tensor(parameter: str) -> str:
    """The tensor name of a parameter of the tower, whose merger is the projector."""
    return f"{PROJECTOR if parameter.startswith('merger.') else TOWER}{parameter}"
