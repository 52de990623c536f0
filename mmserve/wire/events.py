"""Conversion of events to messages, and back."""

from __future__ import annotations

from typing import Any

from mmserve.core import events
from mmserve.errors import Internal
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire.enums import DRAFT_STATES, REASONS, number_of
from mmserve.wire.plain import from_message, to_message

_STATES: dict[str, Any] = {name: number for number, name in DRAFT_STATES.items()}


def to_response(event: events.Event, request_id: str) -> pb.GenerateResponse:
    """The response message of ``event``; ``Failed`` has none, because it becomes a status."""
    match event:
        case events.Admitted():
            admitted = to_message(event, pb.Admitted(request_id=request_id))
            return pb.GenerateResponse(admitted=admitted)
        case events.Prefilled():
            return pb.GenerateResponse(prefilled=to_message(event, pb.Prefilled()), sample=event.sample)
        case events.Snapshot():
            return pb.GenerateResponse(snapshot=to_message(event, pb.Snapshot()), sample=event.sample)
        case events.Draft():
            return pb.GenerateResponse(draft=_draft(event), sample=event.sample)
        case events.Delta():
            return pb.GenerateResponse(delta=to_message(event, pb.Delta()), sample=event.sample)
        case events.ToolCallDelta():
            return pb.GenerateResponse(tool_call_delta=to_message(event, pb.ToolCallDelta()), sample=event.sample)
        case events.Finished():
            reason = number_of(REASONS, event.reason, "reason")
            finished = to_message(event, pb.Finished(reason=reason, tokens_per_forward=event.tokens_per_forward))
            return pb.GenerateResponse(finished=finished, sample=event.sample)
    raise TypeError(f"no response message for {event!r}")


def from_response(response: pb.GenerateResponse) -> events.Event:
    """The event in ``response``; raises ``Internal`` if its kind is unknown to this version."""
    match response.WhichOneof("event"):
        case "admitted":
            return from_message(events.Admitted, response.admitted)
        case "prefilled":
            return from_message(events.Prefilled, response.prefilled, sample=response.sample)
        case "snapshot":
            return from_message(events.Snapshot, response.snapshot, sample=response.sample)
        case "draft":
            return _from_draft(response.draft, response.sample)
        case "delta":
            return from_message(events.Delta, response.delta, sample=response.sample)
        case "tool_call_delta":
            return from_message(events.ToolCallDelta, response.tool_call_delta, sample=response.sample)
        case "finished":
            reason = REASONS.get(response.finished.reason, "unspecified")
            return from_message(events.Finished, response.finished, sample=response.sample, reason=reason)
    raise Internal("the server sent an event that this client does not know", error_id="")


def _draft(draft: events.Draft) -> pb.Draft:
    """Written out for speed: there may be hundreds of positions in each step."""
    positions = [
        pb.DraftPosition(
            index=index,
            id=token,
            text=text,
            state=_STATES[state],
            confidence=confidence,
            alternatives=[pb.DraftAlternative(id=i, text=t, probability=p) for i, t, p in alternatives],
        )
        for index, token, text, state, confidence, alternatives in draft.rows
    ]
    return pb.Draft(positions=positions, total=draft.total, forwards=draft.forwards)


def _from_draft(draft: pb.Draft, sample: int) -> events.Draft:
    rows = tuple(
        (
            at.index,
            at.id,
            at.text,
            DRAFT_STATES.get(at.state, "unspecified"),
            at.confidence,
            tuple((one.id, one.text, one.probability) for one in at.alternatives),
        )
        for at in draft.positions
    )
    return events.Draft(rows, draft.total, draft.forwards, sample)
