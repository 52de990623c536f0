"""Embeddings of newly committed tokens, looked up before the next pass."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mmserve.decode.state import Decoding
from mmserve.kv.on_device import on_device
from mmserve.models.base import LoadedModel


def embed_fresh(model: LoadedModel, batch: Iterable[Decoding]) -> None:
    """Write the embeddings of tokens committed in the latest step, with one look-up for all requests."""
    waiting = [(d, *d.fresh) for d in batch if d.fresh is not None]
    if not waiting:
        return
    counts = [len(at) for _d, at, _tokens in waiting]
    both = np.concatenate([tokens for _d, _at, tokens in waiting] + [at for _d, at, _tokens in waiting])
    tokens, places = on_device(both, model.device).chunk(2)
    found = model.decoder.embed(tokens).split(counts)
    for (d, at, _tokens), rows, where in zip(waiting, found, places.split(counts), strict=True):
        guidance = d.prefilled.guidance
        for embeddings in (d.prefilled.embeddings, *([] if guidance is None else [guidance.embeddings])):
            if len(at) == 1:
                embeddings.narrow(0, int(at[0]), 1).copy_(rows)
            else:
                embeddings.index_copy_(0, where, rows)
        d.fresh = None
