"""Logit biases and penalties of a request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmserve.core.canvas import Canvas, among
from mmserve.core.request import Sampling
from mmserve.kv.on_device import on_device

#: Penalised logits are clamped to this: far above the logits of any model, and far below the maximum of fp32.
_LARGEST = 1e30


#: Tokens (int64 ``[k]``), and the numbers that are added to their logits (fp32 ``[k]``).
Added = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Penalties:
    """The biases and penalties of one request in one step; the same for all its rows."""

    biases: Added | None
    seen: Tensor | None  # int64 ``[m]``: tokens of the prompt and the answer, without the answer's end tokens
    repetition: float
    subtracted: Added | None  # frequency and presence penalties, negated

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
        answer, subtracted = _answer(canvas, end_ids), dict[int, float]()
        if sampling.frequency_penalty or sampling.presence_penalty:
            tokens, counts = np.unique(answer, return_counts=True)
            for token, count in zip(tokens.tolist(), counts.tolist(), strict=True):
                subtracted[token] = -(sampling.frequency_penalty * count + sampling.presence_penalty)
        seen = None
        if sampling.repetition_penalty != 1:
            tokens = np.unique(np.concatenate([canvas.tokens[: canvas.prompt_length], answer]))
            seen = torch.from_numpy(tokens[tokens < vocabulary]).to(device)
        biases = _added(sampling.logit_bias, vocabulary, device)
        return cls(biases, seen, sampling.repetition_penalty, _added(subtracted, vocabulary, device))

    def apply(self, logits: Tensor) -> None:
        """Change ``logits`` (fp32 ``[n, V]``) in place, in vLLM's order.

        First, biases are added. Then logits of tokens in the prompt or answer are divided by the repetition penalty if
        positive, else multiplied (CTRL, arXiv 1909.05858). Last, the presence penalty and, once for each occurrence in
        the answer, the frequency penalty are subtracted (OpenAI's API).
        """
        if self.biases is not None:
            tokens, gains = self.biases
            logits[:, tokens] += gains
        if self.seen is not None:
            scores = logits[:, self.seen]
            penalised = torch.where(scores > 0, scores / self.repetition, scores * self.repetition)
            logits[:, self.seen] = penalised.clamp(-_LARGEST, _LARGEST)
        if self.subtracted is not None:
            tokens, gains = self.subtracted
            logits[:, tokens] += gains


def _added(gains: Mapping[int, float], vocabulary: int, device: torch.device) -> Added | None:
    """``gains`` of the tokens in the vocabulary; None if there are none."""
    known = {token: gain for token, gain in gains.items() if token < vocabulary}
    if not known:
        return None
    tokens, values = np.array(list(known)), np.array(list(known.values()), np.float32)
    return on_device(tokens, device), on_device(values, device)


def _answer(canvas: Canvas, end_ids: Collection[int]) -> np.ndarray:
    """Final tokens of the answer, without padding and end tokens."""
    read = slice(canvas.prompt_length, canvas.size - canvas.unread)
    tokens = canvas.tokens[read][~canvas.masked[read]]
    return tokens[~among(tokens, end_ids)]
