"""Log-probabilities of a prompt's tokens, from the passes of its prefill."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mmserve.core.candidates import Alternatives
from mmserve.core.encoded import Encoded
from mmserve.core.events import PromptToken
from mmserve.decode.alternatives import alternatives
from mmserve.decode.forward import Pass
from mmserve.decode.logits import RowLogits
from mmserve.decode.text import listed, text_of
from mmserve.decode.token_texts import beginning, token_bytes
from mmserve.models.base import ModelSpec


class PromptScores:
    """The scores of a prompt's tokens by the logits of their left neighbours, as passes compute these.

    ``vocabulary``: number of tokens with logits. ``count``: number of most probable tokens of each position.
    """

    def __init__(self, encoded: Encoded, spec: ModelSpec, vocabulary: int, count: int) -> None:
        self._ids, self._shift, self._count = encoded.ids, spec.logit_shift, count
        self._predicted = encoded.ids < vocabulary
        self._predicted[encoded.image_rows] = False
        self._log_probabilities = np.full(len(encoded.ids), np.nan)
        self._ranks = np.zeros(len(encoded.ids), np.int64)
        self._others = Alternatives.none(len(encoded.ids), count)

    def wanted(self, p: Pass) -> np.ndarray:
        """The rows of ``p`` whose logits are needed, besides the pass's own (int64, ascending)."""
        return np.union1d(p.wanted, self._positions(p.rows) - self._shift)

    def add(self, p: Pass, logits: RowLogits) -> RowLogits:
        """Score the tokens that ``p`` predicts by the ``logits`` of ``wanted``; returns those of the pass's own."""
        rows = self.wanted(p)
        at = self._positions(rows)
        done = 0
        for part in logits.only(np.searchsorted(rows, at - self._shift)).slices():
            self._score(at[done : done + len(part)], part.float())
            done += len(part)
        return logits.only(np.searchsorted(rows, p.wanted))

    def tokens(self, tokenizer: PreTrainedTokenizerBase) -> tuple[PromptToken, ...]:
        """All tokens of the prompt."""
        spelled = [data for [data] in token_bytes(tokenizer, self._ids[:, None])]
        spelled[:1] = [beginning(tokenizer, int(self._ids[0]), data) for data in spelled[:1]]
        others = listed(tokenizer, self._others, within=True) if self._count else [()] * len(spelled)
        scores = [None if p != p else p for p in self._log_probabilities.tolist()]  # NaN
        rows = zip(self._ids.tolist(), spelled, scores, self._ranks.tolist(), others, strict=True)
        return tuple(PromptToken(i, text_of(data), p, rank, more, data) for i, data, p, rank, more in rows)

    def _positions(self, rows: np.ndarray) -> np.ndarray:
        """The positions of the prompt that ``rows`` predict (int64, ascending)."""
        at = rows + self._shift
        at = at[at < len(self._ids)]
        return at[self._predicted[at]]

    def _score(self, at: np.ndarray, logits_nV: Tensor) -> None:
        """Score the tokens at the positions ``at`` by ``logits_nV`` (fp32)."""
        own = logits_nV.gather(-1, torch.from_numpy(self._ids[at])[:, None].to(logits_nV.device))
        log_z = torch.logsumexp(logits_nV, -1, keepdim=True)
        self._log_probabilities[at] = (own - log_z)[:, 0].cpu().numpy()
        self._ranks[at] = 1 + (logits_nV > own).sum(-1).cpu().numpy()
        if self._count:
            found = alternatives(logits_nV, self._count, (), None)
            self._others.tokens[at], self._others.log_probabilities[at] = found
