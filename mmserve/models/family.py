"""The common part of LLaMA-style checkpoints, for all kinds of decoding: dimensions, special tokens, weights, vision.

The models of the family differ in their ``ModelSpec`` and chat format; each has a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from torch import nn
from transformers import PreTrainedTokenizerFast

from mmserve.errors import ConfigError
from mmserve.models.base import Attention, LoadedModel, ModelSpec
from mmserve.models.chat import IMAGE, VIDEO, adapt_chat_template, load_tokenizer
from mmserve.models.checkpoint import GENERATION, Checkpoint, Target
from mmserve.models.decoder import Decoder, RMSNorm
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.dimensions import decoder_config
from mmserve.models.keys import Keys
from mmserve.models.layouts import NEWLINE, PROJECTOR, TOWER, Layout, layout_of
from mmserve.models.picture import VisionEncoder
from mmserve.models.unfilled import unfilled

if TYPE_CHECKING:
    from mmserve.models.vision import LlavaVision

END_OF_TURN = "<|eot_id|>"
#: End-of-turn tokens of the chat formats of Llama 3 and LLaDA, Qwen (ChatML), Gemma and Phi.
_ENDS_OF_TURN = (END_OF_TURN, "<|im_end|>", "<end_of_turn>", "<|end|>")


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The inputs of a ``ModelSpec``: a checkpoint's files, and the media that it supports."""

    checkpoint: Checkpoint
    keys: Keys
    config: DecoderConfig
    tokenizer: PreTrainedTokenizerFast
    name: str
    image_id: int | None
    video_id: int | None


def load_family(
    checkpoint: Checkpoint,
    target: Target,
    tokenizer: PreTrainedTokenizerFast,
    spec: Callable[[Sources], ModelSpec],
    vision: Callable[[Decoder], VisionEncoder] | None = None,
) -> LoadedModel:
    """Load decoder, tower and projector; ``spec`` returns the model's spec.

    ``vision`` creates the vision encoder for the decoder, if it is not LLaVA's with one tile per image. Raises
    ``ConfigError`` naming the key, tensor or file that is wrong.
    """
    keys = Keys(checkpoint.config, checkpoint.folder / "config.json")
    config = checkpoint.stretch.applied(decoder_config(keys), keys.path)
    check_vocabulary(checkpoint, tokenizer, config)
    images, videos = vision is not None or takes_images(checkpoint), takes_videos(checkpoint)
    made = spec(
        Sources(
            checkpoint=checkpoint,
            keys=keys,
            config=config,
            tokenizer=tokenizer,
            name=target.name,
            image_id=placeholder(tokenizer, IMAGE) if images else None,
            video_id=placeholder(tokenizer, VIDEO) if videos else None,
        )
    )
    decoder = load_decoder(checkpoint, config, target, layout_of(checkpoint.config))
    if not images:
        checkpoint.weights.ignore(f"{TOWER}*", f"{PROJECTOR}*", NEWLINE)  # the configuration has no tower
    seeing = vision(decoder) if vision is not None else None
    if images and seeing is None:
        from mmserve.models.towers import load_vision  # imports take a second, and text models do not need them

        seeing = llava = load_vision(checkpoint, config.hidden_size, target)
        _check_frame_text(keys, tokenizer, llava)
    checkpoint.weights.check_all_read()
    return LoadedModel(made, decoder, tokenizer, seeing, target.dtype, target.device)


def load_text(checkpoint: Checkpoint, target: Target, spec: Callable[[Sources], ModelSpec]) -> LoadedModel:
    """As ``load_family``, for a text-only model with its own chat template."""
    tokenizer = load_tokenizer(checkpoint.folder)
    adapt_chat_template(tokenizer, checkpoint.folder, images=False, videos=False, vicuna=False)
    return load_family(checkpoint, target, tokenizer, spec)


def make_spec(
    sources: Sources,
    *,
    attention: Attention,
    mask_id: int | None = None,
    banned: set[int] | None = None,
    logit_shift: int = 0,
    block_length: int = 32,
) -> ModelSpec:
    """The spec of a model that may generate everything except its mask, ``banned`` and the placeholders of its media.

    Without a ``mask_id`` there is no mask: any id may be at an open position. ``banned`` defaults to the tokens that
    the generation settings suppress. Every end token in the configuration, the generation settings or the tokenizer
    ends an answer. Raises ``ConfigError`` for invalid ids, and if there is no end token.
    """
    checkpoint, config = sources.checkpoint, sources.config
    banned = set(listed_ids(checkpoint.generation.get("suppress_tokens"))) if banned is None else banned
    banned, mask_id = (banned, 0) if mask_id is None else (banned | {mask_id}, mask_id)
    ends = _end_ids(sources)
    for what, ids in (("mask_token_id", {mask_id}), ("eos_token_id", ends), ("suppress_tokens", banned)):
        check_tokens(sources, what, ids)
    if ends <= banned:
        raise ConfigError(f"{checkpoint.folder}: every end of text {sorted(ends)} is among the banned tokens")
    # A placeholder beyond the last embedding has no logit either.
    placeholders = {i for i in (sources.image_id, sources.video_id) if i is not None and i < config.vocab_size}
    trained = config.max_positions
    if not checkpoint.stretch.positions:
        keys = Keys(checkpoint.config, sources.keys.path)
        trained = keys.integer("tokenizer_model_max_length", default=trained)
    generation = Keys(checkpoint.generation, checkpoint.folder / GENERATION)
    return ModelSpec(
        name=sources.name,
        architecture=checkpoint.architecture,
        attention=attention,
        mask_id=mask_id,
        end_ids=frozenset(ends),
        padding_id=next((i for i in _padding_ids(sources) if i in ends), None),
        banned_ids=tuple(sorted(banned | placeholders)),
        image_id=sources.image_id,
        video_id=sources.video_id,
        max_tokens=min(config.max_positions, trained),
        max_canvas=generation.integer("max_canvas", default=0),
        default_block_length=block_length,
        logit_shift=logit_shift,
    )


def check_tokens(sources: Sources, what: str, ids: Iterable[Any]) -> None:
    """Raises ``ConfigError`` with the first of ``ids`` that is no token of the model; ``what``: their name in the
    error."""
    size = sources.config.vocab_size
    wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < size]
    if wrong:
        raise ConfigError(f"{sources.checkpoint.folder}: {what} {wrong[0]!r} is no token of {size}")


def next_token(sources: Sources) -> ModelSpec:
    """The spec of a model that decodes token by token."""
    return make_spec(sources, attention=Attention.CAUSAL, logit_shift=1)


def takes_images(checkpoint: Checkpoint) -> bool:
    """Whether the layout can have a vision tower, and the configuration has one."""
    return checkpoint.architecture.startswith("llava_") and bool(checkpoint.config.get("mm_vision_tower"))


def takes_videos(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint supports images, and has a number of frames per video."""
    return takes_images(checkpoint) and bool(checkpoint.config.get("mm_video_frames"))


def mask_id_of(sources: Sources, token: str) -> Any:
    """The mask token's id: ``mask_token_id`` of the configuration, else ``token``, else the tokenizer's mask.

    Not validated; ``make_spec`` does that. Raises ``ConfigError`` if there is none.
    """
    named = listed_ids(sources.keys.values.get("mask_token_id"))
    found = [*named, token_id(sources.tokenizer, token), sources.tokenizer.mask_token_id]
    for mask_id in found:
        if mask_id is not None:
            return mask_id
    raise ConfigError(f"{sources.keys.path} has no mask_token_id and the tokenizer no {token}")


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int | None:
    """A token's id; None if the tokenizer does not have it."""
    found = tokenizer.get_vocab().get(token)
    return None if found is None else int(found)


def listed_ids(value: Any) -> list[Any]:
    """Converts one id, or a list, as in configurations, to a list; not validated."""
    if value is None:
        return []
    return [i if isinstance(i, int) else str(i) for i in (value if isinstance(value, list) else [value])]


def _end_ids(sources: Sources) -> set[Any]:
    checkpoint, tokenizer = sources.checkpoint, sources.tokenizer
    ends = {
        *listed_ids(checkpoint.config.get("eos_token_id")),
        *listed_ids(checkpoint.generation.get("eos_token_id")),
    }
    if not ends and tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    ends |= {i for i in (token_id(tokenizer, token) for token in _ENDS_OF_TURN) if i is not None}
    if not ends:
        raise ConfigError(f"{sources.keys.path} has no eos_token_id and the tokenizer no {END_OF_TURN}")
    return ends


def _padding_ids(sources: Sources) -> list[Any]:
    """The ids that may pad a canvas after an answer's end; the first that is an end token is used."""
    checkpoint, tokenizer = sources.checkpoint, sources.tokenizer
    named = [*listed_ids(checkpoint.config.get("pad_token_id")), *listed_ids(checkpoint.generation.get("pad_token_id"))]
    return [*named, tokenizer.pad_token_id, tokenizer.eos_token_id]


def check_vocabulary(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerFast, config: DecoderConfig) -> None:
    """Raises ``ConfigError`` if the model does not embed all tokens, except for placeholders of media."""
    past = [t for t, i in tokenizer.get_vocab().items() if i >= config.vocab_size and t not in (IMAGE, VIDEO)]
    if past:
        raise ConfigError(
            f"{checkpoint.folder}: the tokenizer has {len(tokenizer)} tokens, the model embeds only {config.vocab_size}"
        )


def load_decoder(checkpoint: Checkpoint, config: DecoderConfig, target: Target, layout: Layout) -> Decoder:
    """The decoder with the checkpoint's weights in ``layout``, frozen and in eval mode.

    As in transformers, if the checkpoint has an output layer although the configuration ties it to the embeddings, that
    layer is used unless the two are equal.
    """
    head, embed, weights = layout.tensor("head.weight"), layout.tensor("embed.weight"), checkpoint.weights
    if config.tie_embeddings and head in weights:
        tied = target.device.type == "meta" or weights.same(head, embed)
        weights.ignore(head)
        config = replace(config, tie_embeddings=tied)
    with unfilled():
        decoder = Decoder(config)
    names = layout.names(decoder)
    # Norms that are stored minus 1 are kept in fp32: in bf16 the sum would lose precision.
    exact = (".expert_bias", *(("norm.weight",) if config.unit_offset else ()))
    checkpoint.weights.fill(decoder, names, target.dtype, target.device, exact=exact)
    decoder.origins = {name: (names[name], p.shape) for name, p in decoder.named_parameters(remove_duplicate=False)}
    if config.unit_offset:
        for norm in (module for module in decoder.modules() if isinstance(module, RMSNorm)):
            norm.weight = nn.Parameter(norm.weight + 1.0, requires_grad=False)
    return decoder.eval()


def placeholder(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """A placeholder's id. LLaVA's tokenizers have none (its code splits the text), so it is added after the others.

    It may be beyond the model's embeddings, because visual tokens replace it.
    """
    if token_id(tokenizer, token) is None:
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False)], special_tokens=True)
    return int(tokenizer.convert_tokens_to_ids(token))


def _check_frame_text(keys: Keys, tokenizer: PreTrainedTokenizerFast, vision: LlavaVision) -> None:
    text = vision.frame_text(0)
    special = set(tokenizer.encode(text, add_special_tokens=False)) & set(tokenizer.get_added_vocab().values())
    if special:
        found = tokenizer.convert_ids_to_tokens(min(special))
        raise ConfigError(
            f"{keys.path}: mm_video_time must be plain text, but {text!r} holds the special token {found!r}"
        )
