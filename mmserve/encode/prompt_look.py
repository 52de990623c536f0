"""Visual tokens that are pruned by what the decoder sees in the whole prompt: after encode, before any page is taken.

The towers' tokens are the same whatever is asked about them, so the cache keeps them unpruned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmserve.core.request import Amount
from mmserve.encode.embedding import deep_rows, embedded
from mmserve.encode.encoded import Encoded
from mmserve.models.attended import Onlooker
from mmserve.models.base import LoadedModel
from mmserve.prune.base import OF_DECODER, Look, Pruner

#: Of an image or a clip: the rows of the prompt (int64, ascending) that are the patches of each grid.
Grids = Sequence[np.ndarray]


def judged_by_decoder(pruner: Pruner | None) -> bool:
    """Whether ``pruner`` must see the whole prompt."""
    return pruner is not None and bool(pruner.needs & OF_DECODER)


class PromptLook:
    """A second look at prompts, by the decoder; holds no state of any request."""

    def __init__(self, model: LoadedModel, onlooker: Onlooker | None = None) -> None:
        self._model, self._onlooker = model, onlooker or Onlooker(model)

    def prune(
        self, encoded: Encoded, media: Sequence[Grids], pruner: Pruner, amount: Amount, new_tokens: int
    ) -> Encoded:
        """``encoded`` with what ``pruner`` leaves of each image and clip; an answer of ``new_tokens`` is to follow."""
        (kind,) = pruner.needs
        spec, size = self._model.spec, len(encoded.ids)
        new = 0 if spec.causal else new_tokens
        ids = np.append(encoded.ids, np.full(new, spec.mask_id))
        at = encoded.places if encoded.places is not None else np.arange(size + 1)
        places = np.concatenate([at[..., :-1], at[..., -1:] + np.arange(new)], axis=-1)
        if self._model.position_axes > 1:
            places = np.broadcast_to(places, (self._model.position_axes, size + new)).copy()
        embeddings, deep = embedded(self._model, ids, encoded)
        added = deep_rows([(np.arange(size), deep)])
        positions = torch.from_numpy(places).to(self._model.device)
        scores = self._onlooker.look(kind, embeddings, positions, size, added)
        kept = np.ones(size, dtype=bool)
        for grids in media:
            looks = [Look(1, len(rows), {kind: _at(scores, rows)}) for rows in grids]
            for rows, plan in zip(grids, pruner.plans(looks, amount), strict=True):
                kept[rows] = False
                kept[rows[plan.places.cpu().numpy()]] = True
        return _kept(encoded, kept)


def _at(scores: Tensor, rows: np.ndarray) -> Tensor:
    return scores[torch.from_numpy(rows).to(scores.device)]


def _kept(encoded: Encoded, kept: np.ndarray) -> Encoded:
    """The rows of a prompt where ``kept`` (bool ``[prompt]``) is True, each with its position."""
    if kept.all():
        return encoded
    size = len(encoded.ids)
    places = encoded.places if encoded.places is not None else np.arange(size + 1)
    visual = np.zeros(size, dtype=bool)
    visual[encoded.image_rows] = True
    chosen = torch.from_numpy(kept[visual])
    left = np.concatenate([[0], np.cumsum(kept)])  # kept rows before each
    features, beside = (
        None if tokens is None else tokens[chosen.to(tokens.device)]
        for tokens in (encoded.features, encoded.companion_features)
    )
    return Encoded(
        encoded.ids[kept],
        np.flatnonzero(visual[kept]),
        features,
        beside,
        places[..., np.append(kept, True)],
        encoded.pruned + int((~kept).sum()),
        tuple(replace(s, start=int(left[s.start]), stop=int(left[s.stop])) for s in encoded.spans),
    )
