"""Keys of pages that can be shared: a hash of everything that the page's K/V depend on.

With causal or block-causal attention, the K/V of a prompt's finished blocks depend only on their own tokens and those
to their left. A page's key is the SHA-256 of the previous page's key and of the page's own contents, as in vLLM's
automatic prefix caching (``vllm/v1/core/kv_cache_utils.py``), but never truncated, and including the bits of visual
tokens, whose placeholders all have the same id.
"""

from __future__ import annotations

from hashlib import sha256
from math import lcm

import numpy as np


def pages_a_unit(page_size: int, block: int) -> int:
    """The smallest number of pages that consist of whole blocks of ``block`` positions: pages are shared in such
    units."""
    return lcm(page_size, block) // page_size


def page_keys(
    ids: np.ndarray,
    visual_rows: np.ndarray,
    features: np.ndarray | None,
    places: np.ndarray | None = None,
    *,
    page_size: int,
    block: int,
    logit_shift: int,
    span: np.ndarray | None = None,
    cache: str = "",
) -> tuple[bytes, ...]:
    """A key (32 bytes) for each page of a prompt that can be shared, in order of position.

    ``ids`` int64 ``[prompt]``; ``features`` uint8 ``[visual tokens, bytes]`` are at ``visual_rows`` (int64, ascending);
    ``places``: rotary positions, int64 ``[prompt]`` (or longer) or ``[axes, prompt]``, None = indices. Text has the
    same position on every axis, so its pages are shared by prompts with and without images. ``span`` (int64
    ``[prompt]``): how many positions each attends to, if some attend beyond their block. Only prompts of the same
    ``cache`` partition share pages.

    Attention ends with the row's block of ``block`` positions, counted from 0. Pages that extend into an unfinished
    block, or to the first row whose logits are needed, have no key: every request runs them.
    """
    size = len(ids)
    unit = pages_a_unit(page_size, block) * page_size
    shared = min(size - logit_shift, size // block * block) // unit * unit
    visual = np.zeros(size, dtype=bool)
    visual[visual_rows] = True
    seen = np.concatenate([[0], np.cumsum(visual)])  # number of visual tokens left of each position
    places = np.atleast_2d(np.arange(size) if places is None else places)
    keys: list[bytes] = []
    parent = sha256(cache.encode()).digest() if cache else b""
    for start in range(0, shared, page_size):
        end = -(-(start + page_size) // unit) * unit  # the page's last block may extend into the next page
        end = end if span is None else max(end, int(span[start : start + page_size].max()))
        made = sha256(parent)
        made.update(ids[start:end].astype(np.int64).tobytes())
        made.update(visual[start:end].tobytes())
        made.update(_distinct(places[:, start:end]).astype(np.int64).tobytes())
        if features is not None:
            made.update(np.ascontiguousarray(features[seen[start] : seen[end]]).data)
        parent = made.digest()
        keys.append(parent)
    return tuple(keys)


def _distinct(places: np.ndarray) -> np.ndarray:
    """The distinct rows of ``places [axes, n]``; one row if all are equal."""
    return places[:1] if (places == places[:1]).all() else places
