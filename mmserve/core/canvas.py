"""The canvas: one request's sequence of tokens, prompt and generated positions, masked or committed.

Plain NumPy state; policies read it, only the decode loop modifies it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from mmserve.core.branches import Branches

#: Values of ``committed_at`` for the prompt, for tokens given before the first pass, and for masked positions.
PROMPT, GIVEN, MASKED = -1, 0, 1 << 30


def among(tokens: np.ndarray, ids: Collection[int]) -> np.ndarray:
    """Bool, in the shape of ``tokens``: which are in ``ids``. For few ids, ten times as fast as ``numpy.isin``."""
    found = np.zeros(tokens.shape, dtype=bool)
    for each in ids:
        found |= tokens == each
    return found


@dataclass
class Canvas:
    """Tokens of positions 0 … N-1, and the step at which each became final.

    ``step``: number of forward passes done; ``block_start``: first position of the current block; ``block_step``:
    number of its forward passes; ``full_passes``: number of those since it was full. Blocks are ``block_length`` long,
    counted from ``origin``; the last may be shorter, and so may the first if ``origin`` is within the prompt.

    ``padded``: end tokens may occur anywhere in the answer as padding, and do not end its text. ``unread``: number of
    last positions that are padding from the start but that passes read as masks. ``logit_shift``: how far left of a
    position the row is whose logits predict it. ``attention_block``: length of the blocks of block-causal attention,
    counted from position 0, if the blocks to be filled are parts of them; 0 = they are equal. ``branches``: set if the
    answer consists of branches that do not attend to each other.
    """

    tokens: np.ndarray  # int64 [N]
    committed_at: np.ndarray  # int64 [N]
    prompt_length: int
    block_length: int
    block_start: int
    step: int = 0
    block_step: int = 0
    full_passes: int = 0
    origin: int = 0
    #: Int64 ``[N]``, or ``[axes, N]`` (time, row, column): rotary positions, as before pruning of visual tokens; None =
    #: the index.
    places: np.ndarray | None = None
    padded: bool = False
    unread: int = 0
    logit_shift: int = 0
    attention_block: int = 0
    branches: Branches | None = None
    _known: int = field(default=0, repr=False)

    @classmethod
    def create(
        cls,
        prompt: np.ndarray,
        *,
        new_tokens: int,
        block_length: int,
        mask_id: int,
        aligned: bool = False,
        places: np.ndarray | None = None,
        logit_shift: int = 0,
        attention_block: int = 0,
    ) -> Canvas:
        """A canvas of ``prompt`` (int64 ids) and ``new_tokens`` masked positions.

        Blocks are counted from the prompt's end or, if ``aligned``, from position 0. ``places``: rotary positions of a
        pruned prompt and of the answer's start, int64 ``[prompt + 1]`` or ``[axes, prompt + 1]``. ``logit_shift``: see
        ``ModelSpec``. ``attention_block``: see ``ModelSpec``, if blocks are ``aligned``.
        """
        size = len(prompt)
        tokens = np.concatenate([prompt.astype(np.int64), np.full(new_tokens, mask_id, np.int64)])
        committed = np.concatenate([np.full(size, PROMPT, np.int64), np.full(new_tokens, MASKED, np.int64)])
        length, origin = (block_length, 0) if aligned else (min(block_length, new_tokens), size)
        if places is not None:
            places = np.concatenate([places[..., :size], places[..., size:] + np.arange(new_tokens)], axis=-1)
        return cls(
            tokens,
            committed,
            size,
            length,
            size,
            origin=origin,
            places=places,
            logit_shift=logit_shift,
            attention_block=attention_block,
            _known=size,
        )

    @property
    def size(self) -> int:
        """Positions of prompt and answer together."""
        return len(self.tokens)

    def rotary_positions(self, positions: np.ndarray) -> np.ndarray:
        """The rotary positions of ``positions`` (int64); pruning does not change those of the remaining positions.

        Int64 ``[n]``, or ``[axes, n]`` if positions have several axes.
        """
        return positions if self.places is None else self.places[..., positions]

    @property
    def new_tokens(self) -> int:
        """Number of positions of the answer."""
        return self.size - self.prompt_length

    @property
    def masked(self) -> np.ndarray:
        """Bool ``[N]``: positions not yet committed."""
        return self.committed_at == MASKED

    @property
    def block_end(self) -> int:
        """The position after the current block."""
        return min(self.block_of(self.block_start) + self.block_length, self.size)

    def block_of(self, position: int) -> int:
        """First position of the block that contains ``position``; may be in the prompt."""
        return position - (position - self.origin) % self.block_length

    def attention_block_start(self, position: int) -> int:
        """First position of the attention block that contains ``position``, with block-causal attention."""
        return position - position % self.attention_block if self.attention_block else self.block_of(position)

    @property
    def attention_block_end(self) -> int:
        """The position after the attention block of the current block, with block-causal attention."""
        length = self.attention_block or self.block_length
        return min(self.attention_block_start(self.block_start) + length, self.size)

    @property
    def run_end(self) -> int:
        """The position after those that a pass runs, with block-causal attention.

        If a block's first token is predicted by the previous block, that block runs alone first, until the token is
        known.
        """
        first = self.block_start
        begins = first - self.logit_shift < self.attention_block_start(first) and self.committed_at[first] == MASKED
        return first if begins else self.attention_block_end

    def block_masked(self) -> np.ndarray:
        """Positions (int64, ascending) of the current block that are masked."""
        return self.block_start + np.flatnonzero(self.committed_at[self.block_start : self.block_end] == MASKED)

    def block_is_full(self) -> bool:
        """Whether the current block has no masked position."""
        return MASKED not in self.committed_at[self.block_start : self.block_end]

    def block_to_fill(self) -> int:
        """Number of positions of the current block that were masked before the first pass."""
        return int((self.committed_at[self.block_start : self.block_end] > GIVEN).sum())

    def all_masked(self) -> np.ndarray:
        """Positions (int64, ascending) of the whole canvas that are masked."""
        return np.flatnonzero(self.masked)

    def count_forward(self) -> None:
        """Record that a forward pass over this canvas was made."""
        self.step += 1
        self.block_step += 1
        self.full_passes += self.block_is_full()

    def commit(self, positions: np.ndarray, tokens: np.ndarray, *, hold: bool = False) -> None:
        """Fill masked ``positions`` with ``tokens``; raises ``ValueError`` for a position that is committed already.

        If the block is then full, advances to the next one, unless ``hold``.
        """
        if (self.committed_at[positions] != MASKED).any():
            raise ValueError("a committed position cannot be committed again")
        self.tokens[positions] = tokens
        self.committed_at[positions] = self.step
        if not hold:
            self.advance()

    def edit(self, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Replace committed tokens of the current block; raises ``ValueError`` for other positions."""
        inside = (positions >= self.block_start) & (positions < self.block_end)
        if not inside.all() or (self.committed_at[positions] == MASKED).any():
            raise ValueError("only committed positions of the current block can be edited")
        self.tokens[positions] = tokens
        self.committed_at[positions] = self.step

    def advance(self) -> None:
        """Advance to the next block that has a masked position, if the current one has none."""
        while self.block_start < self.size and self.block_is_full():
            self.block_start, self.block_step, self.full_passes = self.block_end, 0, 0

    def block(self) -> np.ndarray:
        """Positions (int64, ascending) of the current block."""
        return np.arange(self.block_start, self.block_end)

    def known(self) -> int:
        """Number of leading positions before the first masked one."""
        while self._known < self.size and self.committed_at[self._known] != MASKED:
            self._known += 1
        return self._known

    def answer(self, end_ids: Collection[int], *, revised: bool = False) -> tuple[np.ndarray, bool]:
        """The final tokens of the answer so far, and whether the answer is complete.

        Final tokens are those left of the first masked position (or, if ``revised``, left of the current block, whose
        tokens may still be replaced), up to the first end token. The answer is complete if an end token was reached, or
        if no position is left. In a ``padded`` answer, end tokens are left out, and do not complete it.
        """
        known = min(self.known(), self.block_start) if revised else self.known()
        tokens = self.tokens[self.prompt_length : known]
        is_end = among(tokens, end_ids)
        if self.padded:
            return tokens[~is_end], known == self.size
        if is_end.any():
            return tokens[: int(is_end.argmax())], True
        return tokens, known == self.size
