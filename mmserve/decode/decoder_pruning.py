"""Pruning of visual tokens by the decoder's attention over the prompt, at the start of prefill, before pages are
allocated.

The vision tower's tokens do not depend on the question, so the cache keeps them unpruned.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmserve.core.encoded import Encoded
from mmserve.core.request import Amount, Request
from mmserve.encode.embedding import deep_rows, embedded
from mmserve.encode.lengths import answer_length, check_length
from mmserve.models.attended import PromptAttention
from mmserve.models.base import LoadedModel
from mmserve.prune import pruner_of
from mmserve.prune.base import GridView, Pruner


class DecoderPruning:
    """Pruning of prompts by the attention of the decoder's first layers; holds no state of any request."""

    def __init__(self, model: LoadedModel, attention: PromptAttention | None = None) -> None:
        self._model, self._attention = model, attention or PromptAttention(model)

    def pruned(self, request: Request, encoded: Encoded, max_tokens: int) -> Encoded:
        """``encoded``, which has ``grids``, after the request's pruner.

        Raises ``InvalidArgument`` if the result and the answer together exceed ``max_tokens``.
        """
        pruner, amount = pruner_of(request), request.vision.amount
        assert pruner is not None and amount is not None, "encode leaves grids to pruners"
        new = answer_length(request, self._model)
        left = self.prune(encoded, pruner, amount, new)
        check_length(request, len(left.ids), new, max_tokens)
        return left

    def prune(self, encoded: Encoded, pruner: Pruner, amount: Amount, new_tokens: int) -> Encoded:
        """``encoded`` with each of its ``grids`` pruned by ``pruner``; ``new_tokens``: length of the answer that
        follows."""
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
        scores = self._attention.to_positions(kind, embeddings, positions, size, added)
        kept = np.ones(size, dtype=bool)
        for grids in encoded.grids:
            views = [GridView(1, len(rows), {kind: _at(scores, rows)}) for rows in grids]
            for rows, plan in zip(grids, pruner.plans(views, amount), strict=True):
                kept[rows] = False
                kept[rows[plan.places.cpu().numpy()]] = True
        return _keep_rows(encoded, kept)


def _at(scores: Tensor, rows: np.ndarray) -> Tensor:
    return scores[torch.from_numpy(rows).to(scores.device)]


def _keep_rows(encoded: Encoded, kept: np.ndarray) -> Encoded:
    """The rows of a prompt where ``kept`` (bool ``[prompt]``) is True, with their original positions; without grids."""
    if kept.all():
        return replace(encoded, grids=())
    size = len(encoded.ids)
    places = encoded.places if encoded.places is not None else np.arange(size + 1)
    visual = np.zeros(size, dtype=bool)
    visual[encoded.image_rows] = True
    chosen = torch.from_numpy(kept[visual])
    left = np.concatenate([[0], np.cumsum(kept)])  # number of kept rows before each row
    features, companion_features = (
        None if tokens is None else tokens[chosen.to(tokens.device)]
        for tokens in (encoded.features, encoded.companion_features)
    )
    return Encoded(
        encoded.ids[kept],
        np.flatnonzero(visual[kept]),
        features,
        companion_features,
        places[..., np.append(kept, True)],
        encoded.pruned + int((~kept).sum()),
        tuple(replace(s, start=int(left[s.start]), stop=int(left[s.stop])) for s in encoded.spans),
    )
