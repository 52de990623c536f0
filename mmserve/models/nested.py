"""Checkpoints of transformers' vision-language classes: ``text_config`` of ``config.json`` describes the decoder.

Missing keys of ``text_config`` have the defaults of transformers' class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedTokenizerFast

from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel, ModelSpec
from mmserve.models.chat import VIDEO, adapt_chat_template, change_templates, load_tokenizer
from mmserve.models.checkpoint import Checkpoint, Target, read_json
from mmserve.models.dimensions import decoder_config
from mmserve.models.family import Sources, check_vocabulary, load_decoder, next_token, placeholder
from mmserve.models.keys import Keys
from mmserve.models.layouts import HUGGING_FACE, Layout
from mmserve.models.picture import VisionEncoder
from mmserve.models.switches import NESTED, refuse_text_model
from mmserve.models.tensor_parts import Part
from mmserve.models.unfilled import unfilled

#: Exceptions of transformers for an unreadable configuration or processor.
UNREADABLE = (OSError, ValueError, TypeError, AttributeError, KeyError, StrictDataclassError)


def read_config(kind: type[Any], checkpoint: Checkpoint, **changes: Any) -> Any:
    """``config.json``, with ``changes`` to its keys, as transformers' configuration class ``kind``; raises
    ``ConfigError`` if it cannot be read."""
    try:
        return kind.from_dict({**checkpoint.config, **changes})
    except UNREADABLE as error:
        raise ConfigError(f"{checkpoint.folder / 'config.json'}: {error}") from error


def read_processor(kind: type[Any], folder: Path, **changes: Any) -> Any:
    """A checkpoint's image processor, with ``changes`` to its settings; raises ``ConfigError`` if it cannot be read."""
    try:
        return kind.from_pretrained(folder, local_files_only=True, **changes)
    except UNREADABLE as error:
        raise ConfigError(f"{folder}: the image processor's settings cannot be read: {error}") from error


def use_processor_template(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Set the chat template of ``chat_template.json`` in ``tokenizer``: the predecessor of ``chat_template.jinja``."""
    path = folder / "chat_template.json"
    if path.is_file() and not (folder / "chat_template.jinja").is_file():
        tokenizer.chat_template = read_json(path).get("chat_template", tokenizer.chat_template)


def image_token(
    tokenizer: PreTrainedTokenizerFast, config: Any, checkpoint: Checkpoint, name: str = "image_token_id"
) -> str:
    """The token with the id ``image_token_id`` (or the key ``name``), an image's placeholder in a chat; raises
    ``ConfigError`` if there is none."""
    token = tokenizer.convert_ids_to_tokens(getattr(config, name))
    if not isinstance(token, str):
        path = checkpoint.folder / "config.json"
        raise ConfigError(f"{path}: {name} {getattr(config, name)!r} is no token of the tokenizer")
    return token


def nested_tokenizer(
    checkpoint: Checkpoint,
    config: Any,
    *,
    videos: bool = False,
    video: str = "",
    picture: str = "{}",
    change: Callable[[str], str] = str,
) -> PreTrainedTokenizerFast:
    """The tokenizer, with a chat template that renders images and, if ``videos``, videos.

    ``video``: the key of a video's token; if empty, the token is ``VIDEO``. ``picture``: the text around an image's
    token in a chat. ``change`` is first applied to the checkpoint's own template. Raises ``ConfigError``.
    """
    tokenizer = load_tokenizer(checkpoint.folder)
    use_processor_template(tokenizer, checkpoint.folder)
    image = picture.format(image_token(tokenizer, config, checkpoint))
    change_templates(tokenizer, change)
    clip = image_token(tokenizer, config, checkpoint, video) if videos and video else VIDEO
    adapt_chat_template(tokenizer, checkpoint.folder, images=True, videos=videos, vicuna=False, image=image, video=clip)
    return tokenizer


def found_layout(checkpoint: Checkpoint, of: Layout = HUGGING_FACE) -> tuple[Layout, str]:
    """The layout of a decoder's tensors, and the prefix of all others: as published, or in transformers' nested form.
    ``of``: names of a layer's parts."""
    within = layout_below("model.language_model", "lm_head", of)
    if within.tensor("embed.weight") in checkpoint.weights:
        return within, "model."
    return layout_below("language_model.model", "language_model.lm_head", of), ""


def layout_below(stem: str, head: str, of: Layout = HUGGING_FACE) -> Layout:
    """The tensor names of ``of`` with ``stem`` instead of ``model``, and ``head`` for the output layer."""
    outer = {"embed": f"{stem}.embed_tokens", "norm": f"{stem}.norm", "head": head}
    return replace(of, outer=outer, layers=f"{stem}.layers")


def load_nested(
    checkpoint: Checkpoint,
    target: Target,
    config: Any,
    tokenizer: PreTrainedTokenizerFast,
    layout: Layout,
    see: Callable[[int], VisionEncoder],
    spec: Callable[[Sources], ModelSpec] = next_token,
    video: str = VIDEO,
    texts: tuple[str, ...] = NESTED,
) -> LoadedModel:
    """A model with ``config`` (of transformers) and the decoder's ``layout``.

    ``see`` loads the vision encoder for a width of visual tokens; ``spec`` returns the model's spec; ``video``:
    placeholder of a video in a chat; ``texts``: supported text models. Raises ``ConfigError`` naming the key, tensor or
    file that is wrong.
    """
    values = config.text_config.to_dict()
    values["tie_word_embeddings"] = bool(config.tie_word_embeddings)
    keys = Keys(values, checkpoint.folder / "config.json")
    if values.get("model_type") not in texts:
        raise refuse_text_model(keys)
    dimensions = checkpoint.stretch.applied(decoder_config(keys), keys.path)
    check_vocabulary(checkpoint, tokenizer, dimensions)
    vision = see(dimensions.hidden_size)
    sources = Sources(
        checkpoint=checkpoint,
        keys=keys,
        config=dimensions,
        tokenizer=tokenizer,
        name=target.name,
        image_id=config.image_token_id,
        video_id=placeholder(tokenizer, video) if vision.frames_per_video else None,
    )
    made = replace(spec(sources), special_tokens=True)
    decoder = load_decoder(checkpoint, dimensions, target, layout)
    checkpoint.weights.check_all_read()
    return LoadedModel(made, decoder, tokenizer, vision, target.dtype, target.device)


def load_part(make: Callable[[], nn.Module], prefix: str, checkpoint: Checkpoint, target: Target) -> nn.Module:
    """A module of transformers with the checkpoint's tensors that begin with ``prefix``, frozen, in eval mode.

    It must have no buffers: they would not be filled.
    """
    return load_renamed(make, lambda name: prefix + name, checkpoint, target)


def load_renamed(
    make: Callable[[], nn.Module], name_of: Callable[[str], Part], checkpoint: Checkpoint, target: Target
) -> nn.Module:
    """As ``load_part``; ``name_of`` maps each parameter's name to a tensor, or to rows of one."""
    with unfilled():
        module = make()
    names = {name: name_of(name) for name, _ in module.named_parameters()}
    checkpoint.weights.fill(module, names, target.dtype, target.device)
    return module.eval()
