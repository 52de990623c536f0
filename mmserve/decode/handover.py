"""Canvases as plain data, and back: from the pages of one store to those of another."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmserve.core.payloads import CandidatesState, CanvasPayload, GuidanceState, KVState, PrefilledPayload
from mmserve.core.request import Request
from mmserve.decode.commit import Candidates
from mmserve.decode.commit.base import Verdict
from mmserve.decode.companion import Companion
from mmserve.decode.constrained.restored import constraint_state
from mmserve.decode.constrained.state import Constrained
from mmserve.decode.repairing import Repairing
from mmserve.decode.state import CompanionState, Decoding, Guidance, Prefilled, Taken
from mmserve.errors import TransferError
from mmserve.kv.pool import pages_for
from mmserve.kv.reducer import LayerNotes, Reducing
from mmserve.kv.reduction import reduction_of
from mmserve.kv.sparse import Sparse
from mmserve.kv.store import KVStore
from mmserve.kv.table import PageTable


class Handover:
    """What is handed over between the stores of one model's decoders, and their companions'."""

    def __init__(self, store: KVStore, companion: Companion | None, sparse: Sparse | None) -> None:
        self._store, self._companion, self._sparse = store, companion, sparse

    def prefilled(self, state: Prefilled, candidates: Candidates | None) -> PrefilledPayload:
        """A copy of ``state``; ``candidates``: those that are not chosen from yet."""
        guidance = state.guidance
        extensions: dict[str, Any] = {}
        if state.companion is not None:
            extensions["companion"] = self._companion_state(state.companion, state.pages)
        if state.reducing is not None:
            extensions["eviction"] = _reducing_state(state.reducing)
        if state.taken is not None:
            extensions["image_reuse"] = _taken_state(state.taken)
        return PrefilledPayload(
            canvas=state.canvas,
            kv=self._kv(self._store, state.pages, state.held),
            recomputed=state.recomputed,
            candidates=None if candidates is None else _candidates_state(candidates),
            constraint=None if state.constrained is None else constraint_state(state.constrained),
            embeddings=state.embeddings,
            deep=state.deep,
            guidance=None
            if guidance is None
            else GuidanceState(guidance.scale, guidance.embeddings, self._kv(self._store, guidance.pages, state.held)),
            extensions=extensions,
        )

    def restored(
        self, request: Request, payload: PrefilledPayload, pages: PageTable, constrained: Constrained | None
    ) -> Prefilled:
        """The state of ``request`` over ``pages`` of this store, which are its own.

        Raises ``TransferError`` where what came does not fit this store, or this server.
        """
        ids = np.asarray(pages.ids, dtype=np.int64)
        guidance, held = None, payload.kv.positions
        if payload.guidance is not None:
            ids, beside = ids[: len(ids) // 2], ids[len(ids) // 2 :]
            self._take(self._store, beside, payload.guidance.kv)
            guidance = Guidance(payload.guidance.scale, beside, payload.guidance.embeddings)
        self._take(self._store, ids, payload.kv)
        if self._sparse is not None:
            self._sparse.took(ids[: pages_for(held, self._store.page_size)], held)
        candidates = None if payload.candidates is None else _candidates(payload.candidates)
        found = dict(payload.extensions)
        companion, eviction = found.pop("companion", None), found.pop("eviction", None)
        image_reuse = found.pop("image_reuse", None)
        if found:
            raise TransferError(f"a canvas came with {sorted(found)}, which this server does not know")
        return Prefilled(
            payload.canvas,
            ids,
            payload.embeddings,
            candidates,  # type: ignore[arg-type]
            payload.recomputed,
            held,
            None if companion is None else self._restored_companion(companion, ids),
            constrained,
            payload.deep,
            None if eviction is None else _reducing(request, eviction),
            None if image_reuse is None else _taken(image_reuse),
            guidance,
        )

    def _kv(self, store: KVStore, pages: np.ndarray, positions: int) -> KVState:
        held = pages[: pages_for(positions, store.page_size)]
        return KVState(positions, store.page_size, store.read_pages(held))

    def _take(self, store: KVStore, pages: np.ndarray, kv: KVState) -> None:
        if kv.page_size != store.page_size:
            raise TransferError(f"pages of {kv.page_size} positions came to a store of pages of {store.page_size}")
        count = pages_for(kv.positions, kv.page_size)
        if count > len(pages):
            raise TransferError(f"{count} pages came, and {len(pages)} are there for them")
        store.write_pages(pages[:count], kv.tensors)

    def _companion_state(self, state: CompanionState, pages: np.ndarray) -> dict[str, Any]:
        assert self._companion is not None
        known = np.flatnonzero(state.seen >= 0)
        return {
            "embeddings": state.embeddings,
            "seen": state.seen,
            "drafted": state.drafted,
            "verdict": None
            if state.verdict is None
            else {
                "own": _candidates_state(state.verdict.own),
                "rank": state.verdict.rank,
                "relative": state.verdict.relative,
            },
            "forwards": state.forwards,
            "deep": state.deep,
            "kv": self._kv(self._companion.store, pages, int(known[-1]) + 1 if len(known) else 0),
        }

    def _restored_companion(self, state: dict[str, Any], pages: np.ndarray) -> CompanionState:
        if self._companion is None:
            raise TransferError("a canvas came with a companion's state, and this server has no companion")
        self._take(self._companion.store, pages, state["kv"])
        verdict = state["verdict"]
        if verdict is not None:
            verdict = Verdict(_candidates(verdict["own"]), verdict["rank"], verdict["relative"])
        return CompanionState(
            state["embeddings"], state["seen"], state["drafted"], verdict, state["forwards"], state["deep"]
        )


def live_canvas(handover: Handover, d: Decoding) -> CanvasPayload:
    """A copy of a canvas between two steps."""
    return CanvasPayload(
        handover.prefilled(d.prefilled, d.candidates),
        d.text.state(),
        d.log_probabilities,
        d.forwards,
        d.edits,
        d.rows,
        d.fresh,
    )


def _candidates_state(found: Candidates) -> CandidatesState:
    return CandidatesState(found.positions, found.tokens, found.confidence, found.gap, found.entropy)


def _candidates(state: CandidatesState) -> Candidates:
    return Candidates(state.positions, state.tokens, state.confidence, state.gap, state.entropy)


def _reducing_state(state: Reducing) -> dict[str, Any]:
    return {
        "prompt": state.prompt,
        "visual_rows": state.visual_rows,
        "visual": state.visual,
        "evicted": state.evicted,
        "outputs": state.outputs,
        "layers": [vars(notes) for notes in state.layers],
    }


def _reducing(request: Request, state: dict[str, Any]) -> Reducing:
    policy = reduction_of(request)
    if policy is None:
        raise TransferError("a canvas came whose K/V are reduced, and its request asks for none of that")
    return Reducing(policy, **{**state, "layers": [LayerNotes(**notes) for notes in state["layers"]]})


def _taken_state(state: Taken) -> dict[str, Any]:
    return {"held": state.held, "repairing": None if state.repairing is None else vars(state.repairing)}


def _taken(state: dict[str, Any]) -> Taken:
    repairing = state["repairing"]
    return Taken(state["held"], None if repairing is None else Repairing(**repairing))
