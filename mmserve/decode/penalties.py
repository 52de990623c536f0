"""Logit biases and penalties of a request."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmserve.core.canvas import Canvas, among
from mmserve.core.request import Sampling

#: Penalised logits are clamped to this: far above the logits of any model, and far below the maximum of fp32.
_LARGEST = 1e30


@dataclass(frozen=True)
class Penalties:
    """The biases and penalties of one request in one step; the same for all its rows."""

    added: tuple[Tensor, Tensor] | None  # tokens int64 ``[k]``, and their biases, fp32 ``[k]``
    held: Tensor | None  # int64 ``[m]``: tokens of the prompt and the answer, without the answer's end tokens
    repetition: float

    @classmethod
    def of(
        cls,
        canvas: Canvas,
        sampling: Sampling,
        vocabulary: int,
        device: torch.device,
        end_ids: Collection[int],
    ) -> Penalties | None:
        """The penalties and biases of ``sampling`` for the current ``canvas``; None if there are none.

        ``end_ids`` are not counted in the answer, because they pad a canvas after its end.
        """
        if not sampling.changes_logits:
            return None
        gains = dict(sampling.logit_bias)
        answer = _answer(canvas, end_ids)
        if sampling.frequency_penalty or sampling.presence_penalty:
            tokens, counts = np.unique(answer, return_counts=True)
            for token, count in zip(tokens.tolist(), counts.tolist(), strict=True):
                lost = sampling.frequency_penalty * count + sampling.presence_penalty
                gains[token] = gains.get(token, 0.0) - lost
        gains = {token: gain for token, gain in gains.items() if token < vocabulary}
        added = None
        if gains:
            added = torch.tensor(list(gains), device=device), torch.tensor(list(gains.values()), device=device)
        held = None
        if sampling.repetition_penalty != 1:
            tokens = np.unique(np.concatenate([canvas.tokens[: canvas.prompt_length], answer]))
            held = torch.from_numpy(tokens[tokens < vocabulary]).to(device)
        return cls(added, held, sampling.repetition_penalty)

    def apply(self, logits: Tensor) -> None:
        """Change ``logits`` (fp32 ``[n, V]``) in place.

        Biases are added; the presence penalty and, once for each occurrence in the answer, the frequency penalty are
        subtracted (OpenAI's API). Then logits of tokens in the prompt or answer are divided by the repetition penalty
        if positive, else multiplied (CTRL, arXiv 1909.05858).
        """
        if self.added is not None:
            tokens, gains = self.added
            logits[:, tokens] += gains
        if self.held is not None:
            scores = logits[:, self.held]
            penalised = torch.where(scores > 0, scores / self.repetition, scores * self.repetition)
            logits[:, self.held] = penalised.clamp(-_LARGEST, _LARGEST)


def _answer(canvas: Canvas, end_ids: Collection[int]) -> np.ndarray:
    """Final tokens of the answer, without padding and end tokens."""
    read = slice(canvas.prompt_length, canvas.size - canvas.unread)
    tokens = canvas.tokens[read][~canvas.masked[read]]
    return tokens[~among(tokens, end_ids)]
