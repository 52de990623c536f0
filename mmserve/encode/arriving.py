"""A prompt whose visual tokens are still on their way: what is known of it, and what has come."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mmserve.core.encoded import Encoded


class Arriving:
    """One request's prompt with one clip, from when its rows are known until all of its visual tokens are there.

    Written by the thread that reads the clip; ``filled`` is read by others, and what is before it never changes.
    ``begun`` is called with the prompt, its ``features`` zero, and ``more`` how many of its rows are final.
    """

    def __init__(self, begun: Callable[[Encoded], None], more: Callable[[int], None]) -> None:
        self._begun, self._more = begun, more
        self.encoded: Encoded | None = None
        self.filled = 0  # visual tokens that are there
        self._fetched = 0  # those that ``fetch`` returned

    def begin(self, encoded: Encoded) -> None:
        """The prompt's rows are known."""
        self.encoded = encoded
        self._begun(encoded)

    def add(self, tokens_kD: Tensor) -> None:
        """The next visual tokens, in order."""
        encoded, count = self.encoded, len(tokens_kD)
        if encoded is None or encoded.features is None or self.filled + count > len(encoded.image_rows):
            return
        encoded.features[self.filled : self.filled + count] = tokens_kD
        self.filled += count
        if self.filled < len(encoded.image_rows):  # the rest is for ``complete``
            self._more(int(encoded.image_rows[self.filled]))

    def fetch(self) -> tuple[np.ndarray, Tensor] | None:
        """Rows (int64) and features of the visual tokens that came since the last call; for one thread."""
        encoded, filled = self.encoded, self.filled
        if encoded is None or encoded.features is None or filled == self._fetched:
            return None
        new = slice(self._fetched, filled)
        self._fetched = filled
        return encoded.image_rows[new], encoded.features[new]

    @torch.inference_mode()
    def complete(self, encoded: Encoded) -> bool:
        """Take over the whole prompt as it turned out; False where that is not the one that was begun with."""
        mine = self.encoded
        if mine is None or mine.features is None or encoded.features is None:
            return False
        same = np.array_equal(mine.ids, encoded.ids) and np.array_equal(mine.image_rows, encoded.image_rows)
        if not same or not torch.equal(mine.features[: self.filled], encoded.features[: self.filled]):
            return False
        mine.features[self.filled :] = encoded.features[self.filled :]
        self.filled = len(mine.image_rows)
        return True
