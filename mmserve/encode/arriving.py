"""A prompt whose visual tokens are still being computed: its known rows, and the tokens so far."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mmserve.core.encoded import Encoded


class Arriving:
    """The prompt of a request with one clip, from when its rows are known until all of its visual tokens are computed.

    Written by the thread that reads the clip; ``filled`` is read by other threads, and earlier tokens never change.
    ``begun`` is called with the prompt, whose ``features`` are zero, and ``more`` with the number of its final rows.
    """

    def __init__(self, begun: Callable[[Encoded], None], more: Callable[[int], None]) -> None:
        self._begun, self._more = begun, more
        self.encoded: Encoded | None = None
        self.filled = 0  # number of visual tokens so far
        self._fetched = 0  # number of them returned by ``fetch``

    def begin(self, encoded: Encoded) -> None:
        """Set the prompt, whose rows are known."""
        self.encoded = encoded
        self._begun(encoded)

    def add(self, tokens_kD: Tensor) -> None:
        """Append the next visual tokens, in order."""
        encoded, count = self.encoded, len(tokens_kD)
        if encoded is None or encoded.features is None or self.filled + count > len(encoded.image_rows):
            return
        encoded.features[self.filled : self.filled + count] = tokens_kD
        self.filled += count
        if self.filled < len(encoded.image_rows):  # the last call is made by ``complete``
            self._more(int(encoded.image_rows[self.filled]))

    def fetch(self) -> tuple[np.ndarray, Tensor] | None:
        """Rows (int64) and features of the visual tokens added since the last call; None if there are none. For one
        thread."""
        encoded, filled = self.encoded, self.filled
        if encoded is None or encoded.features is None or filled == self._fetched:
            return None
        new = slice(self._fetched, filled)
        self._fetched = filled
        return encoded.image_rows[new], encoded.features[new]

    @torch.inference_mode()
    def complete(self, encoded: Encoded) -> bool:
        """Take over the fully encoded prompt; returns False if it differs from the one that was begun."""
        known = self.encoded
        if known is None or known.features is None or encoded.features is None:
            return False
        same = np.array_equal(known.ids, encoded.ids) and np.array_equal(known.image_rows, encoded.image_rows)
        if not same or not torch.equal(known.features[: self.filled], encoded.features[: self.filled]):
            return False
        known.features[self.filled :] = encoded.features[self.filled :]
        self.filled = len(known.image_rows)
        return True
