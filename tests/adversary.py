"""A model that does what harms a constraint most, and documents that are nearly what a schema asks for."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmserve.constraint.search.vocabulary import spell
from mmserve.models.base import LoadedModel
from mmserve.models.lora import Adapted

#: What a position may be mad about, of the bytes of a token.
_OBSESSIONS: list[Callable[[bytes], bool]] = [
    lambda text: bool(text) and all(b in b'{}[]":, ' for b in text),
    lambda text: bool(text) and all(b in b"0123456789.eE+-" for b in text),
    lambda text: any(b in b"\\\x00\n\x7f" or b >= 0x80 for b in text),
    lambda text: text in (b'"', b"\\", b"{", b"["),
    lambda text: text in (b"null", b"true", b"false", b"n", b"t", b"f"),
    lambda text: len(text) > 4,
]


def adversarial(model: LoadedModel) -> LoadedModel:
    """``model`` with logits that urge, at each position, some kind of token that mostly may not stand there.

    Which kind follows from the hidden state: it changes with every token that becomes final, and is the same alone and
    in any batch. End tokens are a kind of their own, and so is what the model itself would say, ten times as sure.
    """
    texts = spell(model.tokenizer.backend_tokenizer)[: model.decoder.config.vocab_size]
    urges = torch.zeros(len(_OBSESSIONS) + 2, model.decoder.config.vocab_size)
    for kind, holds in enumerate(_OBSESSIONS):
        for token, text in enumerate(texts):
            urges[kind, token] = 12.0 * holds(text)
    urges[len(_OBSESSIONS), list(model.spec.end_ids)] = 30.0
    decoder = copy.deepcopy(model.decoder)
    own = decoder.logits

    def logits(hidden: Tensor, adapted: Adapted | None = None) -> Tensor:
        plain = own(hidden, adapted)
        kind = (hidden.abs().sum(-1) * 997).long() % len(urges)
        sure = torch.where(kind == len(urges) - 1, 10.0, 1.0)
        return plain * sure[..., None] + urges[kind]

    decoder.logits = logits
    return dataclasses.replace(model, decoder=decoder)


def near_misses(text: str, rng: random.Random, count: int) -> list[str]:
    """Texts a small change away from ``text``, a JSON document: of its value, or of its bytes."""
    found = []
    for _ in range(count):
        if rng.random() < 0.7:
            value = _changed(json.loads(text), rng)
            found.append(json.dumps(value, ensure_ascii=False, separators=rng.choice(((",", ":"), (", ", ": ")))))
        else:
            at, piece = rng.randrange(len(text) + 1), rng.choice(['"', "0", ".5", "e9", "a", "é", ",", "\\", "[]", ""])
            found.append(text[:at] + piece + text[at + rng.randint(0, 1) :])
    return found


_OTHERS: list[Any] = [None, True, False, 0, 1, -1, 2.5, 100, "", "a", "ab", "é", "10", [], [1], {}, {"a": 1}]


def _changed(value: Any, rng: random.Random) -> Any:
    """``value`` with one thing changed somewhere in it."""
    if isinstance(value, (list, dict)) and value and rng.random() < 0.7:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        at = rng.choice(keys)
        return _with(value, at, _changed(value[at], rng))
    if rng.random() < 0.25:
        return rng.choice(_OTHERS)
    match value:
        case dict():
            name = rng.choice([*value, "a", "b", "zz", "x", "0"])
            if name in value and rng.random() < 0.6:
                return {key: each for key, each in value.items() if key != name}
            return {**value, name: rng.choice(_OTHERS)}
        case list():
            more = [*value, rng.choice([*value, *_OTHERS])]
            return rng.choice((more, value[:-1], value[::-1]))
        case bool() | None:
            return rng.choice(_OTHERS)
        case int() | float():
            return value + rng.choice((1, -1, 0.5, 0.001, -100, value))
    at = rng.randrange(len(value) + 1)
    return rng.choice((value[:at] + rng.choice("a0Z é\n") + value[at:], value[:at] + value[at + 1 :], value * 2))


def _with(value: Any, at: Any, inner: Any) -> Any:
    changed = copy.copy(value)
    changed[at] = inner
    return changed
