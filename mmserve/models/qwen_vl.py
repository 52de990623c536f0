"""Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL (arXiv 2511.21631), dense or with experts.

Autoregressive. The decoder is ``Decoder`` with three position axes (M-RoPE); towers come from transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel, ModelSpec
from mmserve.models.chat import VIDEO, adapt_chat_template, load_tokenizer
from mmserve.models.checkpoint import CONFIG, Checkpoint, Target
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.dimensions import decoder_config
from mmserve.models.family import Sources, check_vocabulary, load_decoder, next_token
from mmserve.models.keys import Keys
from mmserve.models.layouts import HUGGING_FACE, Layout
from mmserve.models.nested import layout_below, use_processor_template
from mmserve.models.processors import own_frames, video_settings
from mmserve.models.qwen3_vision import Qwen3Vision
from mmserve.models.qwen25_vision import Qwen25Vision
from mmserve.models.qwen_moe import EXPERTS, STACKED
from mmserve.models.qwen_pixels import load_pixels
from mmserve.models.qwen_vision import QwenVision
from mmserve.models.unfilled import unfilled

#: Default number of frames sampled from a video; ``mm_video_frames`` is a key of this project.
FRAMES = 16


@dataclass(frozen=True)
class Kind:
    """The vision part of one of the models."""

    config: type[Any]
    tower: type[Any]
    vision: type[QwenVision]
    limits_together: bool  # a video's pixel limits are for all frames together
    frames: str  # its video processor's rule (``OwnFrames``)
    width: str  # key of a visual token's width


KINDS = {
    "qwen2_vl": Kind(
        Qwen2VLVisionConfig, Qwen2VisionTransformerPretrainedModel, QwenVision, False, "starts", "hidden_size"
    ),
    "qwen2_5_vl": Kind(
        Qwen2_5_VLVisionConfig,
        Qwen2_5_VisionTransformerPretrainedModel,
        Qwen25Vision,
        False,
        "starts",
        "out_hidden_size",
    ),
    "qwen3_vl": Kind(Qwen3VLVisionConfig, Qwen3VLVisionModel, Qwen3Vision, True, "ends", "out_hidden_size"),
    "qwen3_vl_moe": Kind(Qwen3VLVisionConfig, Qwen3VLVisionModel, Qwen3Vision, True, "ends", "out_hidden_size"),
}
#: Prefix of the tower and layout of the decoder: of Qwen2-VL and Qwen2.5-VL as published, and of Qwen3-VL.
_NESTED = layout_below("model.language_model", "lm_head")
_EXPERTS = replace(_NESTED, layer={**_NESTED.layer, **EXPERTS}, stacked=STACKED)


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load any of these models; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    return load_as(checkpoint, target, KINDS[checkpoint.architecture], next_token)


def load_as(checkpoint: Checkpoint, target: Target, kind: Kind, spec: Callable[[Sources], ModelSpec]) -> LoadedModel:
    """As ``load``, with the vision part of ``kind`` and the spec that ``spec`` returns."""
    checkpoint = flat(checkpoint)
    keys = Keys(checkpoint.config, checkpoint.folder / CONFIG)
    tower = tower_config(checkpoint, kind)
    config = checkpoint.stretch.applied(_decoder_config(keys, tower, kind), keys.path)
    sources = chat_sources(checkpoint, target, keys, config, videos=True)
    prefix, layout = _names(checkpoint)
    decoder = load_decoder(checkpoint, config, target, layout)
    vision = kind.vision(
        load_tower(checkpoint, kind, tower, lambda name: prefix + name, target),
        load_pixels(checkpoint.folder, tower, together=kind.limits_together),
        frames=keys.integer("mm_video_frames", default=FRAMES),
    )
    if "mm_video_frames" not in checkpoint.config:
        path, video = video_settings(checkpoint.folder)
        vision.own_frames = own_frames(kind.frames, video, path)
    checkpoint.weights.check_all_read()
    return LoadedModel(spec(sources), decoder, sources.tokenizer, vision.eval(), target.dtype, target.device)


def chat_sources(checkpoint: Checkpoint, target: Target, keys: Keys, config: DecoderConfig, *, videos: bool) -> Sources:
    """The tokenizer, with a chat template for images and ``videos``, and other inputs of a spec.

    Raises ``ConfigError`` naming the key, token or file that is wrong.
    """
    tokenizer = load_tokenizer(checkpoint.folder)
    image_id = keys.integer("image_token_id")
    video_id = keys.integer("video_token_id") if videos else None
    image = framed(tokenizer, keys, image_id)
    video = framed(tokenizer, keys, video_id) if video_id is not None else VIDEO
    use_processor_template(tokenizer, checkpoint.folder)
    adapt_chat_template(
        tokenizer, checkpoint.folder, images=True, videos=videos, vicuna=False, image=image, video=video
    )
    check_vocabulary(checkpoint, tokenizer, config)
    return Sources(
        checkpoint=checkpoint,
        keys=keys,
        config=config,
        tokenizer=tokenizer,
        name=target.name,
        image_id=image_id,
        video_id=video_id,
    )


def framed(tokenizer: PreTrainedTokenizerFast, keys: Keys, placeholder: int) -> str:
    """The text of an image or a video; raises ``ConfigError`` if the tokenizer lacks a token of it."""
    ids = (keys.integer("vision_start_token_id"), placeholder, keys.integer("vision_end_token_id"))
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    missing = [number for number, token in zip(ids, tokens, strict=True) if token is None]
    if missing:
        raise ConfigError(f"{keys.path}: the tokenizer has no token {missing[0]}, which encloses or replaces an image")
    return "".join(tokens)


def flat(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with the decoder's keys at the top level, as in Qwen2-VL: Qwen3-VL has them in ``text_config``."""
    text = checkpoint.config.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise ConfigError(f"{checkpoint.folder / CONFIG}: text_config must be an object, not {text!r}")
    own = {name: value for name, value in checkpoint.config.items() if name != "text_config"}
    tied = any(values.get("tie_word_embeddings") for values in (own, text))
    return checkpoint.with_config({**text, **own, "tie_word_embeddings": tied})


def tower_config(checkpoint: Checkpoint, kind: Kind) -> Any:
    """The configuration of the vision tower of ``kind``, from ``vision_config``; raises ``ConfigError``."""
    path, values = checkpoint.folder / CONFIG, checkpoint.config.get("vision_config")
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} has no vision_config")
    try:
        config = kind.config.from_dict({name: value for name, value in values.items() if name != "model_type"})
    except (TypeError, ValueError, AttributeError, StrictDataclassError) as error:
        raise ConfigError(f"{path}: vision_config: {error}") from error
    return config


def _decoder_config(keys: Keys, tower: Any, kind: Kind) -> DecoderConfig:
    config = decoder_config(keys)
    if config.position_axes != 3:
        raise ConfigError(
            f"{keys.path}: rope_scaling has no mrope_section, which assigns axes of position to frequencies"
        )
    check_width(keys, tower, kind, config)
    deep = len(getattr(tower, "deepstack_visual_indexes", ()))
    try:
        return replace(config, deep_layers=deep)
    except ValueError as error:
        raise ConfigError(f"{keys.path}: deepstack_visual_indexes: {error}") from error


def check_width(keys: Keys, tower: Any, kind: Kind, config: DecoderConfig) -> None:
    """Raises ``ConfigError`` if visual tokens and embeddings differ in width."""
    if getattr(tower, kind.width) != config.hidden_size:
        made = f"{kind.width} = {getattr(tower, kind.width)}"
        raise ConfigError(f"{keys.path}: vision_config.{made}, but embeddings are {config.hidden_size} wide")


def _names(checkpoint: Checkpoint) -> tuple[str, Layout]:
    """The prefix of the tower's tensors, and the decoder's layout."""
    nested = any(name.startswith("model.language_model.") for name in checkpoint.weights.names)
    if checkpoint.architecture == "qwen3_vl_moe":
        return "model.visual.", _EXPERTS
    return ("model.visual.", _NESTED) if nested else ("visual.", HUGGING_FACE)


def load_tower(
    checkpoint: Checkpoint, kind: Kind, config: Any, name_of: Callable[[str], str], target: Target
) -> nn.Module:
    """The vision tower of ``config``; ``name_of`` maps each parameter to its tensor. Raises ``ConfigError``."""
    with unfilled():
        tower: Any = kind.tower(config)
    names = {name: name_of(name) for name, _ in tower.named_parameters()}
    checkpoint.weights.fill(tower, names, target.dtype, target.device)
    tower.rotary_pos_emb = type(tower.rotary_pos_emb)(config).to(target.device)  # frequencies are in no checkpoint
    return tower
