"""Top-k alternatives of each position, recorded from a pass's logits while another reader consumes them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmserve.core.candidates import Alternatives
from mmserve.core.canvas import Canvas
from mmserve.core.request import Sampling
from mmserve.decode.logits import RowLogits
from mmserve.decode.penalties import Penalties


def alternatives(
    logits_nV: Tensor, count: int, banned: tuple[int, ...], mask_id: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids and log-probabilities (both ``[n, count]``) of the ``count`` most probable tokens of each row.

    ``logits_nV`` is fp32 and is unchanged on return. Tokens in ``banned`` are never returned. ``mask_id``: a banned
    token that still counts in the softmax's denominator (see ``sampler.candidates``). If the vocabulary has fewer than
    ``count`` tokens, rows are padded with token 0 and -inf.
    """
    columns = list(banned)
    taken = logits_nV[:, columns]
    logits_nV[:, columns] = -torch.inf  # restored below: cloning all logits would take as long as topk
    top = logits_nV.topk(min(count, logits_nV.shape[-1]), -1)
    if mask_id in columns:
        logits_nV[:, mask_id] = taken[:, columns.index(mask_id)]
    log_z = torch.logsumexp(logits_nV, -1)
    logits_nV[:, columns] = taken
    found = (top.values - log_z[:, None]).cpu().numpy()
    tokens, missing = top.indices.cpu().numpy(), count - found.shape[1]
    if missing:
        tokens = np.pad(tokens, ((0, 0), (0, missing)))
        found = np.pad(found, ((0, 0), (0, missing)), constant_values=-np.inf)
    return tokens, found


@dataclass
class _Recorded:
    """The alternatives recorded so far, one row for each position of a pass."""

    positions: np.ndarray  # int64 [n], ascending
    found: Alternatives


class RecordingLogits:
    """A ``RowLogits`` wrapper that records the top-k alternatives of each row before a reader gets the row.

    ``positions`` (int64, ascending) are those of the rows. The recorded log-probabilities include the penalties and
    biases of ``sampling``. ``end_ids``: see ``sampler.candidates``.
    """

    def __init__(
        self,
        rows: RowLogits,
        positions: np.ndarray,
        canvas: Canvas,
        sampling: Sampling,
        count: int,
        banned: tuple[int, ...],
        mask_id: int | None,
        recorded: _Recorded | None = None,
        *,
        end_ids: Collection[int] = (),
    ) -> None:
        self._rows, self._count = rows, count
        self._recorded = recorded or _Recorded(positions, Alternatives.none(len(positions), count))
        self._positions = positions
        self._context = canvas, sampling, banned, mask_id
        self._end_ids = end_ids

    def only(self, rows: np.ndarray) -> RecordingLogits:
        """The logits of some rows (see ``RowLogits.only``); their alternatives are recorded in the same object."""
        canvas, sampling, banned, mask_id = self._context
        kept = self._positions[rows]
        return RecordingLogits(
            self._rows.only(rows),
            kept,
            canvas,
            sampling,
            self._count,
            banned,
            mask_id,
            self._recorded,
            end_ids=self._end_ids,
        )

    def slices(self) -> Iterator[Tensor]:
        done = 0
        for part in self._rows.slices():
            self._record(part, self._positions[done : done + len(part)])
            done += len(part)
            yield part

    def whole(self) -> Tensor:
        made = self._rows.whole()
        self._record(made, self._positions)
        return made

    def of(self, positions: np.ndarray) -> Alternatives:
        """The recorded alternatives of ``positions`` (int64, ascending); -inf for positions that the pass did not
        run."""
        recorded = self._recorded
        at = np.searchsorted(recorded.positions, positions).clip(max=max(0, len(recorded.positions) - 1))
        if not len(recorded.positions):
            return Alternatives.none(len(positions), self._count)
        found = recorded.found.where(at)
        found.log_probabilities[recorded.positions[at] != positions] = -np.inf
        return found

    def _record(self, part: Tensor, positions: np.ndarray) -> None:
        canvas, sampling, banned, mask_id = self._context
        logits = part.float()
        penalties = Penalties.of(canvas, sampling, logits.shape[-1], logits.device, self._end_ids)
        if penalties is not None:
            logits = logits.clone()
            penalties.apply(logits)
        at = np.searchsorted(self._recorded.positions, positions)
        tokens, found = alternatives(logits, self._count, banned, mask_id)
        self._recorded.found.tokens[at], self._recorded.found.log_probabilities[at] = tokens, found
