"""Handover of requests to decode: from prefill, or as plain data from one K/V store to another."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from mmserve.constraint.restored import session_state
from mmserve.constraint.session.session import Session
from mmserve.core.encoded import DeepStack
from mmserve.core.payloads import CanvasPayload, GuidanceState, KVState, PrefilledPayload
from mmserve.core.request import Request
from mmserve.decode.commit import Candidates
from mmserve.decode.commit.base import Verdict
from mmserve.decode.drafts import record_for
from mmserve.decode.extensions.base import RequestExtension, extension_of
from mmserve.decode.extensions.constraint import Constraint
from mmserve.decode.extensions.decisions import SlotState
from mmserve.decode.extensions.draft_model import DraftModel, DraftState
from mmserve.decode.extensions.image_reuse.reuse import ReusedKV
from mmserve.decode.extensions.image_reuse.selective import SelectiveRecompute
from mmserve.decode.extensions.own_blocks import FilledBlock
from mmserve.decode.extensions.self_draft import OwnDraft
from mmserve.decode.parts import Parts
from mmserve.decode.policies import commit_policy, recompute_policy
from mmserve.decode.state import Decoding, Guidance, Prefilled
from mmserve.decode.text import TextStream
from mmserve.errors import TransferError
from mmserve.kv.evictor import EvictionState, LayerNotes
from mmserve.kv.pool import pages_for
from mmserve.kv.store import KVStore
from mmserve.kv.table import PageTable

#: Types of extensions' snapshots; in a payload, each is a dict of its fields, under its name.
_STATES = (
    *(Candidates, DeepStack, DraftState, EvictionState, LayerNotes, OwnDraft, ReusedKV, SelectiveRecompute),
    *(FilledBlock, SlotState, Verdict),
)
_BY_NAME = {kind.__name__: kind for kind in _STATES}
_KIND = "is"


def payload_of(parts: Parts, state: Prefilled | Decoding) -> PrefilledPayload | CanvasPayload:
    """The payload of a request that continues in another store: after prefill, or between two decode steps."""
    if isinstance(state, Prefilled):
        return _prefilled(parts, state, state.candidates, state.ahead)
    return CanvasPayload(
        _prefilled(parts, state.prefilled, state.candidates),
        state.text.state(),
        state.log_probabilities,
        state.forwards,
        state.edits,
        state.rows,
        state.fresh,
        record=state.record,
    )


def opened(parts: Parts, request: Request, prefilled: Prefilled) -> Decoding:
    """The decode state of a request after prefill."""
    return Decoding(
        request,
        prefilled,
        recompute_policy(request),
        commit_policy(request, parts.offered),
        TextStream(parts.model.tokenizer, request.sampling.stop, within=request.keeps_space),
        prefilled.candidates,
        np.zeros(prefilled.canvas.size, np.float32),
        record=record_for(request.streaming, prefilled.canvas.new_tokens),
    )


def restored(
    parts: Parts,
    request: Request,
    payload: PrefilledPayload | CanvasPayload,
    pages: PageTable,
    session: Session | None,
) -> Decoding:
    """The decode state of a request received as ``payload``, in ``pages`` of this store.

    ``session``: its constraint. K/V that were sent ahead are in the pages already. Raises ``TransferError`` if the
    payload does not match this store or this server.
    """
    state, candidates = _received(parts, request, payload.prefilled, pages, session)
    d = opened(parts, request, state)
    d.candidates = candidates
    if isinstance(payload, CanvasPayload):
        d.text = TextStream.restored(
            parts.model.tokenizer, request.sampling.stop, payload.text, within=request.keeps_space
        )
        d.log_probabilities, d.rows, d.fresh = payload.log_probabilities, payload.rows, payload.fresh
        d.forwards, d.edits, d.record = payload.forwards, payload.edits, payload.record
    return d


def _received(
    parts: Parts, request: Request, payload: PrefilledPayload, pages: PageTable, session: Session | None
) -> tuple[Prefilled, Candidates | None]:
    """The state of ``request`` over ``pages``, and the candidates of its next step, if the payload has them."""
    ids = np.asarray(pages.ids, dtype=np.int64)
    guidance, held = None, payload.kv.positions
    if payload.guidance is not None:
        ids, unconditional = ids[: len(ids) // 2], ids[len(ids) // 2 :]
        _fill(parts.store, unconditional, payload.guidance.kv)
        guidance = Guidance(payload.guidance.scale, unconditional, payload.guidance.embeddings)
    if not payload.kv.ahead:
        _fill(parts.store, ids, payload.kv)
    parts.runner.record_loaded(ids[: pages_for(held, parts.store.page_size)], held)
    extensions = [_restored(parts, request, payload, plain) for plain in payload.extensions]
    if payload.draft_kv is not None:
        draft_model = extension_of(parts.extensions, DraftModel)
        if draft_model is None:
            raise TransferError("the received canvas has K/V of a draft model, and this server has none")
        _fill(draft_model.store, ids, payload.draft_kv)
    if session is not None:
        extensions.append(Constraint(session))
    found = payload.candidates
    assert payload.embeddings is not None, "models with pages have embeddings"
    none = Candidates(ids[:0], ids[:0], np.zeros(0, np.float32), None, None)
    return Prefilled(
        payload.canvas,
        ids,
        payload.embeddings,
        none if found is None else found,
        payload.recomputed,
        held,
        tuple(extensions),
        payload.deep,
        guidance,
        parts.adapters.of(request),
    ), found


def _prefilled(parts: Parts, state: Prefilled, candidates: Candidates | None, ahead: int = 0) -> PrefilledPayload:
    guidance, constraint = state.guidance, extension_of(state.extensions, Constraint)
    snapshots = [each.snapshot() for each in state.extensions if each is not constraint]
    store = parts.store
    kv = KVState(state.held, store.page_size, {}, ahead) if ahead else _kv(store, state.pages, state.held)
    draft, draft_model = extension_of(snapshots, DraftState), extension_of(parts.extensions, DraftModel)
    return PrefilledPayload(
        canvas=state.canvas,
        kv=kv,
        recomputed=state.recomputed,
        candidates=candidates,
        constraint=None if constraint is None else session_state(constraint.session),
        embeddings=state.embeddings,
        deep=state.deep,
        guidance=None
        if guidance is None
        else GuidanceState(guidance.scale, guidance.embeddings, _kv(store, guidance.pages, state.held)),
        draft_kv=None if draft is None or draft_model is None else _draft_kv(draft_model.store, draft, state.pages),
        extensions=tuple(_plain(snapshot) for snapshot in snapshots if snapshot is not None),
    )


def _restored(parts: Parts, request: Request, payload: PrefilledPayload, plain: Any) -> RequestExtension:
    snapshot = _live(plain)
    for extension in parts.extensions:
        restored = extension.restore(request, payload.canvas, snapshot)
        if restored is not None:
            return restored
    name = type(snapshot).__name__
    raise TransferError(
        f"the received canvas has the state {name!r}, and this server or its request has no extension for it"
    )


def _kv(store: KVStore, pages: np.ndarray, positions: int) -> KVState:
    held = pages[: pages_for(positions, store.page_size)]
    return KVState(positions, store.page_size, store.read_pages(held))


def _draft_kv(store: KVStore, state: DraftState, pages: np.ndarray) -> KVState:
    known = np.flatnonzero(state.seen >= 0)
    return _kv(store, pages, int(known[-1]) + 1 if len(known) else 0)


def _fill(store: KVStore, pages: np.ndarray, kv: KVState) -> None:
    if kv.page_size != store.page_size:
        raise TransferError(
            f"received K/V have pages of {kv.page_size} positions, and this store has pages of {store.page_size}"
        )
    count = pages_for(kv.positions, kv.page_size)
    if count > len(pages):
        raise TransferError(f"{count} pages were received, and {len(pages)} are allocated for them")
    store.write_pages(pages[:count], kv.tensors)


def _plain(value: Any) -> Any:
    """``value`` with each instance of ``_STATES`` replaced by a dict."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not is_dataclass(value):
        return value
    name = type(value).__name__
    assert name in _BY_NAME, f"{name} is not in _STATES"
    return {_KIND: name, **{field.name: _plain(getattr(value, field.name)) for field in fields(value)}}


def _live(plain: Any) -> Any:
    """The inverse of ``_plain``. Raises ``TransferError`` for an unknown state."""
    if isinstance(plain, list):
        return [_live(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    name = plain.get(_KIND)
    try:
        return _BY_NAME[str(name)](**{key: _live(value) for key, value in plain.items() if key != _KIND})
    except (KeyError, TypeError) as error:
        raise TransferError(f"the received canvas has the state {name!r}, which this server does not have") from error
