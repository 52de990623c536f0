"""LLaDA (arXiv 2502.09992) and LLaDA-V (arXiv 2505.16933): masked diffusion decoders with full attention.

Both layouts load onto one ``Decoder``; LLaDA-V's may add a vision tower and a projector.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from mmserve.errors import ConfigError
from mmserve.models.base import Attention, LoadedModel, ModelSpec, VisionEncoder
from mmserve.models.chat import IMAGE, VIDEO, ensure_chat_template, load_tokenizer
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.decoder import Decoder, DecoderConfig
from mmserve.models.layouts import Keys, decoder_config, layout_of
from mmserve.models.towers import load_vision

MASK, END_OF_TURN = "<|mdm_mask|>", "<|eot_id|>"
#: What LLaDA-V's ``generate`` (modeling_llada.py) rules out at masks beside the end of text.
_NEVER_IN_ANSWERS = ("<|startoftext|>", "<|start_header_id|>", "<|end_header_id|>")


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load either layout; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    keys = Keys(checkpoint.config, checkpoint.folder / "config.json")
    config = decoder_config(keys)
    tokenizer = load_tokenizer(checkpoint.folder)
    sighted = checkpoint.architecture == "llava_llada" and bool(checkpoint.config.get("mm_vision_tower"))
    image_id = _placeholder(tokenizer, IMAGE) if sighted else None
    watching = sighted and bool(checkpoint.config.get("mm_video_frames"))
    video_id = _placeholder(tokenizer, VIDEO) if watching else None
    ensure_chat_template(tokenizer, images=sighted, videos=watching)
    if len(tokenizer) > config.vocab_size:
        raise ConfigError(
            f"{checkpoint.folder}: the tokenizer has {len(tokenizer)} tokens, the model embeds only {config.vocab_size}"
        )
    spec = _spec(checkpoint, keys, config, tokenizer, target.name, image_id=image_id, video_id=video_id)
    decoder = _load_decoder(checkpoint, config, target)
    vision = load_vision(checkpoint, config.hidden_size, target) if sighted else None
    if vision is not None:
        _check_frame_text(keys, tokenizer, vision)
    checkpoint.weights.warn_unread()
    return LoadedModel(spec, decoder, tokenizer, vision, target.dtype, target.device)


def _load_decoder(checkpoint: Checkpoint, config: DecoderConfig, target: Target) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config)
    names = layout_of(checkpoint.config).names(decoder)
    checkpoint.weights.fill(decoder, names, target.dtype, target.device)
    return decoder.eval()


def _spec(
    checkpoint: Checkpoint,
    keys: Keys,
    config: DecoderConfig,
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    *,
    image_id: int | None,
    video_id: int | None,
) -> ModelSpec:
    mask_id = next(iter(_ids(checkpoint.config.get("mask_token_id"))), _token(tokenizer, MASK))
    if mask_id is None:
        raise ConfigError(f"{keys.path} has no mask_token_id and the tokenizer no {MASK}")
    ends = {*_ids(checkpoint.config.get("eos_token_id")), *_ids(checkpoint.generation.get("eos_token_id"))}
    if not ends and tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    turn = _token(tokenizer, END_OF_TURN)
    ends |= {turn} if turn is not None else set()
    if not ends:
        raise ConfigError(f"{keys.path} has no eos_token_id and the tokenizer no {END_OF_TURN}")
    banned = {mask_id, *banned_ids(checkpoint, tokenizer), *(i for i in (image_id, video_id) if i is not None)}
    for what, ids in (("mask_token_id", {mask_id}), ("eos_token_id", ends), ("suppress_tokens", banned)):
        wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < config.vocab_size]
        if wrong:
            raise ConfigError(f"{checkpoint.folder}: {what} {wrong[0]!r} is no token of {config.vocab_size}")
    if ends <= banned:
        raise ConfigError(f"{checkpoint.folder}: every end of text {sorted(ends)} is among the banned tokens")
    trained = checkpoint.config.get("tokenizer_model_max_length")
    return ModelSpec(
        name=name,
        architecture=checkpoint.architecture,
        attention=Attention.FULL,
        mask_id=mask_id,
        end_ids=frozenset(ends),
        banned_ids=tuple(sorted(banned)),
        image_id=image_id,
        video_id=video_id,
        max_tokens=min(config.max_positions, trained) if isinstance(trained, int) else config.max_positions,
    )


def banned_ids(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Token ids that the checkpoint rules out in answers, beside the mask.

    ``suppress_tokens`` in ``generation_config.json`` decides where it is set. Otherwise LLaDA-V's rule holds for
    its layout: its ``generate`` sets 126080, 126081, 126346 and 126347 (start of text, end of text, start and end
    of a header) to minus infinity at masks and stops at ``<|eot_id|>``, so the end of text is banned there as long
    as the end of a turn remains. LLaDA's own ``generate`` bans nothing by default: it was trained to fill the
    canvas behind the answer with the end of text, which must stay possible.
    """
    suppressed = checkpoint.generation.get("suppress_tokens")
    if suppressed is not None:
        return set(_ids(suppressed))
    if checkpoint.architecture != "llava_llada":
        return set()
    names = _NEVER_IN_ANSWERS
    ids = {i for i in (_token(tokenizer, name) for name in names) if i is not None}
    if _token(tokenizer, END_OF_TURN) is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return ids


def _placeholder(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """A placeholder's id; LLaDA-V's tokenizer has none (its code splits the text), so it is added behind the rest."""
    if _token(tokenizer, token) is None:
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False)], special_tokens=True)
    return int(tokenizer.convert_tokens_to_ids(token))


def _check_frame_text(keys: Keys, tokenizer: PreTrainedTokenizerFast, vision: VisionEncoder) -> None:
    text = vision.frame_text(0)
    special = set(tokenizer.encode(text, add_special_tokens=False)) & set(tokenizer.get_added_vocab().values())
    if special:
        found = tokenizer.convert_ids_to_tokens(min(special))
        raise ConfigError(
            f"{keys.path}: mm_video_time must be plain text, but {text!r} holds the special token {found!r}"
        )


def _token(tokenizer: PreTrainedTokenizerFast, token: str) -> int | None:
    found = tokenizer.get_vocab().get(token)
    return None if found is None else int(found)


def _ids(value: Any) -> list[Any]:
    """One id or a list of them, as configurations have either; what is no integer is found out by the range check."""
    if value is None:
        return []
    return [i if isinstance(i, int) else str(i) for i in (value if isinstance(value, list) else [value])]
