"""Companions (draft or verifier models): which model can be the companion of another."""

from __future__ import annotations

from dataclasses import replace

from mmserve.errors import ConfigError
from mmserve.models.base import CanvasModel, LoadedModel, Model


def accompany(model: Model, companion: Model) -> LoadedModel:
    """``model`` with its companion; raises ``ConfigError`` if that is not causal, or has other tokens or another tower.

    Either may have special tokens that the other lacks, such as a diffusion model's mask.
    """
    refused = f"{companion.spec.name!r} cannot be the companion of {model.spec.name!r}"
    if isinstance(model, CanvasModel):
        raise ConfigError(f"{refused}: a model that denoises random tokens takes none")
    if isinstance(companion, CanvasModel) or not companion.spec.causal:
        raise ConfigError(
            f"{refused}: it is no autoregressive model, its attention is {companion.spec.attention.value}"
        )
    other = _other_token(model, companion)
    if other is not None:
        raise ConfigError(f"{refused}: their tokenizers differ, as in the token {other!r}")
    if model.vision is not None and companion.vision is not None:
        for what in ("tokens_per_image", "frames_per_video", "frames_per_second"):
            mine, its = getattr(model.vision, what), getattr(companion.vision, what)
            if mine and its and mine != its:
                raise ConfigError(f"{refused}: its {what} are {its}, not {mine}")
        mine, its = (one.position_axes for one in (model, companion))
        if mine != its:
            raise ConfigError(f"{refused}: its positions have {its} axes, not {mine}")
    return replace(model, companion=companion)


def _other_token(model: LoadedModel, companion: LoadedModel) -> str | None:
    """A token with different ids in the two models, or an ordinary one that only one of them has."""
    mine, its = model.tokenizer.get_vocab(), companion.tokenizer.get_vocab()
    special = {*model.tokenizer.get_added_vocab(), *companion.tokenizer.get_added_vocab()}
    ids = {number: token for token, number in its.items()}
    for token, number in mine.items():
        if its.get(token, number) != number or ids.get(number, token) != token:
            return token
    alone = (mine.keys() ^ its.keys()) - special
    return min(alone, default=None)
