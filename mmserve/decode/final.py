"""The tokens that become final in a step: the commit policy's choice of the candidates, or an extension's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mmserve.core.candidates import Chosen
from mmserve.core.canvas import Canvas, among
from mmserve.decode.commit import Candidates
from mmserve.decode.state import Decoding
from mmserve.models.base import ModelSpec


def final_tokens(d: Decoding, proposed: Candidates, spec: ModelSpec) -> Chosen:
    """The tokens of ``proposed`` that become final, or those that an extension chooses, with padding after an end of
    text."""
    for extension in d.extensions:
        proposed = extension.verify(d.canvas, proposed, d.commit)
    made = (extension.choose(d.canvas, proposed, d.commit) for extension in d.extensions)
    final = next((each for each in made if each is not None), None) or _policy_choice(d, proposed, spec)
    return _closed(d.canvas, final, spec) if d.commit.closes and not d.canvas.padded else final


def _policy_choice(d: Decoding, proposed: Candidates, spec: ModelSpec) -> Chosen:
    alone = spec.causal and len(proposed.positions) == 1  # at least one candidate is always chosen
    which = slice(None) if alone else d.commit.choose(d.canvas, proposed)
    sure = np.log(np.maximum(proposed.confidence[which], np.finfo(np.float32).tiny))
    return Chosen(proposed.positions[which], proposed.tokens[which], sure)


def _closed(canvas: Canvas, final: Chosen, spec: ModelSpec) -> Chosen:
    """``final`` with padding at all open positions after its first end of text.

    Log-probabilities cover the tokens up to the end only.
    """
    ends = np.flatnonzero(among(final.tokens, spec.end_ids))
    if not len(ends):
        return final
    first, positions, tokens = ends[0], final.positions, final.tokens
    right = np.flatnonzero(canvas.masked & (np.arange(canvas.size) > positions[first]))
    padding = spec.padding_id if spec.padding_id is not None else tokens[first]
    filled = np.full(len(right), padding, dtype=np.int64)
    return replace(
        final,
        positions=np.concatenate([positions[: first + 1], right]),
        tokens=np.concatenate([tokens[: first + 1], filled]),
        log_probabilities=np.concatenate([final.log_probabilities[: first + 1], np.zeros(len(right), np.float32)]),
    )
