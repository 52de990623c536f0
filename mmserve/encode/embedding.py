"""Embeddings of a prompt with its visual tokens, and their additions to later layers (DeepStack)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from mmserve.core.encoded import DeepStack, Encoded
from mmserve.models.base import LoadedModel
from mmserve.models.decoder import DeepRows


def place_features(model: LoadedModel, embeddings: Tensor, positions: np.ndarray, features: Tensor) -> DeepStack | None:
    """Write visual tokens into ``embeddings [N, D]`` at ``positions`` (int64, ascending); returns their additions to
    layers.

    ``features``: ``[n, (1 + deep layers) * D]``, an embedding, followed by the addition to each layer.
    """
    at = torch.from_numpy(positions).to(model.device)
    layers, width = model.decoder.config.deep_layers, embeddings.shape[-1]
    embeddings[at] = features[:, :width]
    return DeepStack(positions, features[:, width:].unflatten(-1, (layers, width))) if layers else None


def embedded(model: LoadedModel, ids: np.ndarray, encoded: Encoded) -> tuple[Tensor, DeepStack | None]:
    """Embeddings ``[N, D]`` of ``ids`` (int64 ``[N]``), the encoded prompt and following tokens; and the additions to
    layers."""
    ids = ids.copy()
    ids[encoded.image_rows] = model.spec.mask_id  # placeholders may have no embedding
    embeddings: Tensor = model.decoder.embed(torch.from_numpy(ids).to(model.device))
    if encoded.features is None:
        return embeddings, None
    return embeddings, place_features(model, embeddings, encoded.image_rows, encoded.features)


@torch.inference_mode()
def deep_rows(runs: Iterable[tuple[np.ndarray, DeepStack | None]]) -> DeepRows | None:
    """Additions to the rows of a batch, from pairs of the positions (int64, ascending) run by a request and the
    additions of its visual tokens; None if no visual token is run."""
    offset = 0
    rows: list[np.ndarray] = []
    features: list[Tensor] = []
    for positions, deep in runs:
        if deep is not None:
            _common, here, of_deep = np.intersect1d(positions, deep.positions, assume_unique=True, return_indices=True)
            if len(here):
                rows.append(offset + here)
                features.append(deep.features_nLD[torch.from_numpy(of_deep).to(deep.features_nLD.device)])
        offset += len(positions)
    if not rows:
        return None
    together = torch.cat(features)
    return DeepRows(torch.from_numpy(np.concatenate(rows)).to(together.device), together.transpose(0, 1))
