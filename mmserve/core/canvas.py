"""The canvas: one request's row of tokens, its prompt and its generated positions, masked or committed.

Plain numpy state; policies read it, only the decode loop changes it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from mmserve.core.branches import Branches

#: ``committed_at`` of the prompt, of tokens on the canvas before the first pass, and of a position that is still
#: masked.
PROMPT, GIVEN, MASKED = -1, 0, 1 << 30


def among(tokens: np.ndarray, ids: Collection[int]) -> np.ndarray:
    """Bool, as ``tokens``: which of them are one of a few ``ids``. ``numpy.isin`` takes ten times as long for a few."""
    found = np.zeros(tokens.shape, dtype=bool)
    for each in ids:
        found |= tokens == each
    return found


@dataclass
class Canvas:
    """Tokens of positions 0 … N-1 and the step at which each became final.

    ``step`` counts the forward passes done; ``block_start`` is where the block being filled begins and
    ``block_step`` counts the forward passes done for it, ``full_passes`` those of them made since it was full. Blocks
    are ``block_length`` long, counted from ``origin``; the last may be shorter, and the first where ``origin`` lies
    within the prompt. ``padded``: end tokens may occur anywhere in the answer and are no part of its text, which goes
    on after them. ``unread``: so many of the last positions hold padding from the start that passes read as masks.
    ``logit_shift``: how far left of a position the row is whose logits predict it. ``attention_block``: length of the
    blocks, counted from position 0, that bound what a position sees, where those that are filled are parts of them; 0 =
    they are the same. ``branches``: where the answer is several texts that do not see each other.
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
    #: Int64 ``[N]``: where each stood before visual tokens were pruned, or ``[axes, N]``: time, row and column of each;
    #: None = where it is.
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

        Blocks are counted from the prompt's end, or, ``aligned``, from position 0. ``places``: int64 ``[prompt + 1]``,
        where each position of a pruned prompt stood before, and where the answer begins, or such a row an axis.
        ``logit_shift``: as of the model's spec. ``attention_block``: that of the spec, where blocks are ``aligned``.
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
        """The rotary positions of ``positions`` (int64): pruning does not move what it keeps.

        Int64 ``[n]``, or ``[axes, n]`` where positions have several axes.
        """
        return positions if self.places is None else self.places[..., positions]

    @property
    def new_tokens(self) -> int:
        """Positions of the answer."""
        return self.size - self.prompt_length

    @property
    def masked(self) -> np.ndarray:
        """Bool ``[N]``: positions not yet committed."""
        return self.committed_at == MASKED

    @property
    def block_end(self) -> int:
        """First position right of the current block."""
        return min(self.block_of(self.block_start) + self.block_length, self.size)

    def block_of(self, position: int) -> int:
        """First position of the block that ``position`` lies in; it may be one of the prompt."""
        return position - (position - self.origin) % self.block_length

    def sight_of(self, position: int) -> int:
        """First position of the block that bounds what ``position`` sees, where attention is block-causal."""
        return position - position % self.attention_block if self.attention_block else self.block_of(position)

    @property
    def sight_end(self) -> int:
        """First position right of what the current block sees, where attention is block-causal."""
        length = self.attention_block or self.block_length
        return min(self.sight_of(self.block_start) + length, self.size)

    @property
    def run_end(self) -> int:
        """First position right of what a pass runs, where attention is block-causal.

        A block's first token may be predicted from the block before it: then that is run first, and nothing of the
        block is until its first token is there.
        """
        first = self.block_start
        begins = first - self.logit_shift < self.sight_of(first) and self.committed_at[first] == MASKED
        return first if begins else self.sight_end

    def block_masked(self) -> np.ndarray:
        """Positions (int64, ascending) of the current block that are masked."""
        return self.block_start + np.flatnonzero(self.committed_at[self.block_start : self.block_end] == MASKED)

    def block_is_full(self) -> bool:
        """Whether no position of the current block is masked."""
        return MASKED not in self.committed_at[self.block_start : self.block_end]

    def block_to_fill(self) -> int:
        """Positions of the current block that were masked before the first pass."""
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
        """Fill masked ``positions`` with ``tokens``; ``ValueError`` for a position that is committed already.

        A block that is full is left for the next one, unless ``hold``.
        """
        if (self.committed_at[positions] != MASKED).any():
            raise ValueError("a committed position cannot be committed again")
        self.tokens[positions] = tokens
        self.committed_at[positions] = self.step
        if not hold:
            self.advance()

    def edit(self, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Replace committed tokens of the current block; ``ValueError`` for positions that are none."""
        inside = (positions >= self.block_start) & (positions < self.block_end)
        if not inside.all() or (self.committed_at[positions] == MASKED).any():
            raise ValueError("only committed positions of the current block can be edited")
        self.tokens[positions] = tokens
        self.committed_at[positions] = self.step

    def advance(self) -> None:
        """Go on to the next block that has a masked position, if the current one has none."""
        while self.block_start < self.size and self.block_is_full():
            self.block_start, self.block_step, self.full_passes = self.block_end, 0, 0

    def block(self) -> np.ndarray:
        """Positions (int64, ascending) of the current block."""
        return np.arange(self.block_start, self.block_end)

    def known(self) -> int:
        """Positions, counted from the left, before the first masked one."""
        while self._known < self.size and self.committed_at[self._known] != MASKED:
            self._known += 1
        return self._known

    def answer(self, end_ids: Collection[int], *, revised: bool = False) -> tuple[np.ndarray, bool]:
        """The final tokens of the answer so far, and whether the answer is complete.

        Final are the tokens left of the first masked position, or of the current block where its tokens may still be
        ``revised``, and before the first end token among them; complete means that such an end token was reached, or
        that no position is left. Of a ``padded`` answer the end tokens are left out, and none of them completes it.
        """
        known = min(self.known(), self.block_start) if revised else self.known()
        tokens = self.tokens[self.prompt_length : known]
        is_end = among(tokens, end_ids)
        if self.padded:
            return tokens[~is_end], known == self.size
        if is_end.any():
            return tokens[: int(is_end.argmax())], True
        return tokens, known == self.size
