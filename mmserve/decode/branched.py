"""Branched canvases (typed questions) in the decode step: their layout, the rows that a pass runs, and their attention.

Attention kernels take sequences, each with rows, pages and positions. Each branch is passed to them as one sequence:
its page table is the prompt's full pages, followed by the branch's own pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mmserve.core.branches import Branches
from mmserve.core.canvas import GIVEN, MASKED, PROMPT, Canvas
from mmserve.core.encoded import DeepStack, Encoded, Past
from mmserve.kv.store import Fork
from mmserve.models.base import Attention, ModelSpec
from mmserve.models.decisions import QuestionIds


def question_canvas(spec: ModelSpec, encoded: Encoded, asked: QuestionIds, page_size: int) -> Canvas:
    """The canvas of typed questions: every token is given, except for one masked slot at the end of each branch."""
    prompt = len(encoded.ids)
    branches = Branches.laid_out(prompt, asked.lengths, page_size, spec.attention_block)
    tokens = np.zeros(branches.size, np.int64)
    committed = np.full(branches.size, GIVEN, np.int64)
    tokens[:prompt], committed[:prompt] = encoded.ids, PROMPT
    for positions, own in zip(branches.each(), asked.before, strict=True):
        tokens[positions] = [*encoded.ids[branches.fork :], *own, spec.mask_id]
    committed[branches.last] = MASKED
    return Canvas(
        tokens,
        committed,
        prompt,
        branches.size - prompt,
        prompt,
        origin=prompt,
        places=branches.places(encoded.places),
        logit_shift=spec.logit_shift,
        branches=branches,
    )


def with_repeated_past(encoded: Encoded, branches: Branches) -> Encoded:
    """``encoded`` with its past K/V copied also to the positions at which branches repeat prompt tokens."""
    past = encoded.past
    if past is None:
        return encoded
    at, of = branches.repeats(past.rows)
    keys, values = (torch.cat([held, held[:, torch.from_numpy(of)]], 1) for held in (past.keys, past.values))
    return replace(encoded, past=Past(np.concatenate([past.rows, at]), keys, values))


def repeat_embeddings(embeddings: Tensor, deep: DeepStack | None, branches: Branches) -> DeepStack | None:
    """Copies the prompt's ``embeddings [N, D]`` to the positions where branches repeat it, in place. Returns ``deep``
    with the same positions added."""
    for start in branches.starts.tolist():
        embeddings[start + branches.copied : start + branches.prefix] = embeddings[branches.alike : branches.prompt]
    if deep is None:
        return None
    at, of = branches.repeats(deep.positions)
    return DeepStack(
        np.concatenate([deep.positions, at]), torch.cat([deep.features_nLD, deep.features_nLD[torch.from_numpy(of)]])
    )


def branch_rows(branches: Branches, spec: ModelSpec) -> np.ndarray:
    """The positions (int64, ascending) that are run, of all branches. A slot is not run if the row before it predicts
    it and no other row attends to it."""
    end = None if spec.attention is not Attention.CAUSAL else -spec.logit_shift or None
    return np.concatenate([positions[branches.copied : end] for positions in branches.each()])


def not_run(branches: Branches, spec: ModelSpec) -> int:
    """Positions of the canvas that no pass runs."""
    return branches.size - branches.alike - len(branch_rows(branches, spec))


def fork_of(branches: Branches, pages: np.ndarray, page_size: int) -> Fork:
    """The K/V copy from the prompt's last, partly filled page to the first page of each branch."""
    return Fork(int(pages[branches.fork // page_size]), branches.copied, pages[branches.starts // page_size])


@dataclass(frozen=True)
class AttentionSequence:
    """Rows that attention treats as one sequence: their positions in it (int64, ascending), its pages (int64), how many
    positions are visible, and how many prompt positions do not attend to later ones. ``together``: all rows are always
    run in the same pass. ``shared``: the number of leading pages that the sequence has in common with the adjacent
    branches."""

    rows: np.ndarray
    pages: np.ndarray
    visible: int
    prompt: int
    together: bool = False
    shared: int = 0


def attention_sequences(
    branches: Branches, rows: np.ndarray, pages: np.ndarray, visible: int, page_size: int
) -> Iterator[AttentionSequence]:
    """Splits ``rows`` (int64, ascending positions of a canvas with ``pages``) into sequences for attention, in order.

    ``visible``: the number of leading positions that have K/V after the pass. With prefix attention, a question does
    not attend to its slot.
    """
    fork = branches.fork // page_size
    own = rows[rows < branches.prompt]
    if len(own):
        seen = min(visible, branches.alike)
        yield AttentionSequence(own, pages[: -(-seen // page_size)], seen, seen)
    for positions in branches.each():
        first, last = int(positions[0]), int(positions[-1])
        run = rows[(rows >= first) & (rows <= last)]
        if not len(run):
            continue
        end = branches.fork + (int(run[-1]) - first) + 1
        table = np.concatenate([pages[:fork], pages[first // page_size : last // page_size + 1]])
        yield AttentionSequence(run - first + branches.fork, table, end, end - 1, together=True, shared=fork)
