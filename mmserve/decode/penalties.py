"""What a request adds to and takes from logits before anything is chosen: biases and penalties."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmserve.core.canvas import Canvas, among
from mmserve.core.request import Sampling

#: Penalised logits stay within this: far above the logits of any model, and far from the end of fp32.
_LARGEST = 1e30


@dataclass(frozen=True)
class Penalties:
    """Those of one request at one step, for any of its rows."""

    added: tuple[Tensor, Tensor] | None  # tokens int64 ``[k]``, and what their logits gain, fp32 ``[k]``
    held: Tensor | None  # int64 ``[m]``: tokens of the prompt and the answer
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
        """The penalties and biases of ``sampling`` for ``canvas`` as it is; None where there are none.

        ``end_ids`` are not counted in the answer: they fill a canvas after its end.
        """
        if not sampling.changes_logits:
            return None
        gains = dict(sampling.logit_bias)
        if sampling.frequency_penalty or sampling.presence_penalty:
            answer = _held(canvas, canvas.prompt_length)
            tokens, counts = np.unique(answer[~among(answer, end_ids)], return_counts=True)
            for token, count in zip(tokens.tolist(), counts.tolist(), strict=True):
                lost = sampling.frequency_penalty * count + sampling.presence_penalty
                gains[token] = gains.get(token, 0.0) - lost
        gains = {token: gain for token, gain in gains.items() if token < vocabulary}
        added = None
        if gains:
            added = torch.tensor(list(gains), device=device), torch.tensor(list(gains.values()), device=device)
        held = None
        if sampling.repetition_penalty != 1:
            tokens = np.unique(_held(canvas, 0))
            held = torch.from_numpy(tokens[tokens < vocabulary]).to(device)
        return cls(added, held, sampling.repetition_penalty)

    def apply(self, logits: Tensor) -> None:
        """Change ``logits`` (fp32 ``[n, V]``) in place.

        Biases are added, the presence penalty and, for each time that a token is in the answer, the frequency penalty
        are taken away (OpenAI's API). Then logits of tokens in the prompt or answer are divided by the repetition
        penalty where positive, else multiplied (CTRL, arXiv 1909.05858).
        """
        if self.added is not None:
            tokens, gains = self.added
            logits[:, tokens] += gains
        if self.held is not None:
            scores = logits[:, self.held]
            penalised = torch.where(scores > 0, scores / self.repetition, scores * self.repetition)
            logits[:, self.held] = penalised.clamp(-_LARGEST, _LARGEST)


def _held(canvas: Canvas, start: int) -> np.ndarray:
    """Final tokens from position ``start`` on, but for padding that passes do not read, either."""
    read = slice(start, canvas.size - canvas.unread)
    return canvas.tokens[read][~canvas.masked[read]]
