"""LaViDa (arXiv 2505.16839; jacklishufan/LaViDa): LLaDA's or Dream's decoder with SigLIP's tower.

``lavida-llada-*`` have LLaDA's tensors and configuration, ``lavida-dream-*`` those of Dream; both add LLaVA's
projector, separator and tower. The prompt does not attend to the answer: as with ``prefix_lm`` in the authors'
``predict.py``, its K/V are computed once. That code also drops the line break after an image in LLaDA's format, because
it expects each piece of text to begin with a start token; here it is kept, as in training.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerFast

from mmserve.models import dream, llada
from mmserve.models.base import Attention, LoadedModel, ModelSpec
from mmserve.models.chat import adapt_chat_template, change_templates, ensure_chat_template, load_tokenizer
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.decoder import Decoder
from mmserve.models.family import Sources, load_family, make_spec, mask_id_of, takes_images
from mmserve.models.keys import Keys
from mmserve.models.towers import load_vision
from mmserve.models.vision import LlavaVision

DREAM = "llava_dream"
SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)
#: Prepended to a chat template: LaViDa's system message, if the chat has none.
_SYSTEM_FIRST = (
    "{% if messages[0]['role'] != 'system' %}"
    f"{{% set messages = [{{'role': 'system', 'content': '{SYSTEM}'}}] + messages %}}{{% endif %}}"
)


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load ``jacklishufan/lavida-*``; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    keys = Keys(checkpoint.config, checkpoint.folder / "config.json")
    keys.check({"mm_video_frames": (None, 0), "block_size": (None,), "use_mrope": (False, None)})
    tokenizer = load_tokenizer(checkpoint.folder)
    images = takes_images(checkpoint)
    _adapt_template(tokenizer, checkpoint, images)
    return load_family(checkpoint, target, tokenizer, _spec, _vision(checkpoint, target, keys) if images else None)


def _adapt_template(tokenizer: PreTrainedTokenizerFast, checkpoint: Checkpoint, images: bool) -> None:
    if checkpoint.architecture == DREAM:
        adapt_chat_template(tokenizer, checkpoint.folder, images=images, videos=False, vicuna=False)
    else:
        ensure_chat_template(tokenizer, images=images)
    change_templates(tokenizer, lambda template: _SYSTEM_FIRST + template)


def _spec(sources: Sources) -> ModelSpec:
    shifted = sources.checkpoint.architecture == DREAM
    mask_id = mask_id_of(sources, dream.MASK if shifted else llada.MASK)
    return make_spec(sources, attention=Attention.PREFIX, mask_id=mask_id, logit_shift=int(shifted))


def _vision(checkpoint: Checkpoint, target: Target, keys: Keys) -> Callable[[Decoder], LlavaVision]:
    """Each tile is pooled over 2 × 2 squares, the default of ``get_2dPool``; ``mm_spatial_pool_stride`` is ignored."""
    mode = keys.choice("mm_spatial_pool_mode", ("average", "max", "bilinear"), "bilinear")
    keys.check({"mm_patch_merge_type": ("spatial_unpad",), "mm_use_im_patch_token": (False, None)})
    return lambda decoder: load_vision(checkpoint, decoder.config.hidden_size, target, pool=(2, mode))
