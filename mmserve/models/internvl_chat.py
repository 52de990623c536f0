"""InternVL in its authors' layout: ``internvl_chat``, OpenGVLab/InternVL3-8B and InternVL2_5-1B.

Network and tiles are those of ``internvl``; keys and tensors have other names, which are converted here. The chat
format is that of ``template`` (``internvl_chats.py``). Decoders are Qwen2, Qwen3 or LLaMA. Videos are sampled evenly,
one tile for each frame, after ``Frame1: `` and so on, as in the authors' model cards; the number of frames is not in
any of their files (8 there, 16 in their ``evaluate_mvbench.py``).
"""

from __future__ import annotations

from copy import copy
from typing import Any

from transformers import GotOcr2ImageProcessorPil, InternVLConfig, InternVLVisionModel
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel
from mmserve.models.chat import VIDEO, adapt_chat_template, change_templates, load_tokenizer
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.family import token_id
from mmserve.models.internvl_chats import use_named_format
from mmserve.models.internvl_vision import CLIP_BEGIN, FRAMES, InternVision, check_fit, shuffled_tower
from mmserve.models.keys import Keys
from mmserve.models.nested import UNREADABLE, layout_below, load_nested, load_renamed
from mmserve.models.tensor_parts import Rows

_IMAGE = "<IMG_CONTEXT>"
#: Keys that change the tiles or the network, with the supported values.
_SWITCHES: dict[str, tuple[object, ...]] = {
    "dynamic_image_size": (True,),
    "pad2square": (False, None),
    "ps_version": ("v2",),
    "use_thumbnail": (True,),
}
#: Names in transformers of the parts of a tower's layer, and of the projector.
_LAYER = {
    "lambda_1": "ls1",
    "lambda_2": "ls2",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.projection_layer": "attn.proj",
    "attention.q_norm": "attn.q_norm",
    "attention.k_norm": "attn.k_norm",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_OUTER = {
    "embeddings.cls_token": "embeddings.class_embedding",
    "embeddings.position_embeddings": "embeddings.position_embedding",
    "embeddings.patch_embeddings.projection": "embeddings.patch_embedding",
}
_PROJECTOR = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}
#: Keys of the tower's configuration with the same name in transformers' class.
_SAME = (
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_norm_eps",
    "norm_type",
    "num_attention_heads",
    "num_hidden_layers",
)
_JOINT = ("attention.q_proj", "attention.k_proj", "attention.v_proj")


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load this layout; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    folder = checkpoint.folder
    keys = Keys(checkpoint.config, folder / "config.json")
    keys.check(_SWITCHES)
    tokenizer = load_tokenizer(folder)
    use_named_format(tokenizer, checkpoint.config.get("template"), _IMAGE)
    adapt_chat_template(tokenizer, folder, images=True, videos=True, vicuna=False, image=_IMAGE)
    change_templates(tokenizer, lambda template: template.replace(VIDEO, f"{CLIP_BEGIN}{VIDEO}"))
    config = _translated(keys, token_id(tokenizer, _IMAGE))
    side = keys.integer("force_image_size", default=config.vision_config.image_size[0])
    processor = GotOcr2ImageProcessorPil(
        crop_to_patches=True,
        size={"height": side, "width": side},
        min_patches=keys.integer("min_dynamic_patch", default=1),
        max_patches=keys.integer("max_dynamic_patch"),
        image_mean=list(IMAGENET_DEFAULT_MEAN),
        image_std=list(IMAGENET_DEFAULT_STD),
    )
    check_fit(folder, config, processor)
    width = int(config.vision_config.hidden_size)
    tower = load_renamed(
        lambda: InternVLVisionModel._from_config(config.vision_config), lambda n: _tower(n, width), checkpoint, target
    )
    projector = load_renamed(lambda: InternVLMultiModalProjector(config), _projector, checkpoint, target)
    one_tile = copy(processor)
    one_tile.crop_to_patches = False
    frames = keys.integer("mm_video_frames", default=FRAMES)
    vision = InternVision(shuffled_tower(config, tower, projector), processor, one_tile, frames)
    layout = layout_below("language_model.model", "language_model.lm_head")
    return load_nested(checkpoint, target, config, tokenizer, layout, lambda _width: vision)


def _translated(keys: Keys, image_id: int | None) -> Any:
    """The configuration converted to transformers' class for the same network."""
    if image_id is None:
        raise ConfigError(f"{keys.path.parent}: the tokenizer has no {_IMAGE}")
    given, text = keys.values.get("vision_config"), keys.values.get("llm_config")
    if not isinstance(given, dict) or not isinstance(text, dict):
        raise ConfigError(f"{keys.path} has no vision_config and llm_config")
    tower = Keys(given, keys.path)
    values = {name: given[name] for name in _SAME if name in given}
    values |= {name: [tower.integer(name)] * 2 for name in ("image_size", "patch_size")}
    values |= {"attention_bias": tower.flag("qkv_bias"), "use_qk_norm": tower.flag("qk_normalization")}
    try:
        return InternVLConfig(
            vision_config=values,
            text_config=text,
            image_token_id=image_id,
            downsample_ratio=keys.number("downsample_ratio", default=0.5),
            vision_feature_layer=keys.values.get("select_layer", -1),
            tie_word_embeddings=bool(text.get("tie_word_embeddings")),
        )
    except UNREADABLE as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{keys.path}: {error}") from error


def _tower(parameter: str, width: int) -> str | Rows:
    """The tensor of a parameter of the tower of width ``width``; queries, keys and values are in one tensor."""
    if not parameter.startswith("encoder.layer."):
        return f"vision_model.{_renamed(parameter, _OUTER)}"
    number, inner = parameter.removeprefix("encoder.layer.").split(".", 1)
    stem = f"vision_model.encoder.layers.{number}"
    module, _, leaf = inner.rpartition(".")
    if module in _JOINT:
        return Rows(f"{stem}.attn.qkv.{leaf}", _JOINT.index(module) * width, 3 * width)
    return f"{stem}.{_renamed(inner, _LAYER)}"


def _projector(parameter: str) -> str:
    return _renamed(parameter, _PROJECTOR)


def _renamed(parameter: str, names: dict[str, str]) -> str:
    if parameter in names:
        return names[parameter]
    module, _, leaf = parameter.rpartition(".")
    return f"{names[module]}.{leaf}"
