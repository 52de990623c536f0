"""Events as messages carry them, there and back."""

from __future__ import annotations

from mmserve.core import events
from mmserve.errors import Internal
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire.enums import REASONS, number_of
from mmserve.wire.plain import from_message, to_message


def to_response(event: events.Event, request_id: str) -> pb.GenerateResponse:
    """The response message of ``event``; a ``Failed`` has none, it becomes a status."""
    match event:
        case events.Admitted():
            admitted = to_message(event, pb.Admitted(request_id=request_id))
            return pb.GenerateResponse(admitted=admitted)
        case events.Snapshot():
            return pb.GenerateResponse(snapshot=to_message(event, pb.Snapshot()), sample=event.sample)
        case events.Delta():
            return pb.GenerateResponse(delta=to_message(event, pb.Delta()), sample=event.sample)
        case events.Finished():
            reason = number_of(REASONS, event.reason, "reason")
            finished = to_message(event, pb.Finished(reason=reason, tokens_per_forward=event.tokens_per_forward))
            return pb.GenerateResponse(finished=finished, sample=event.sample)
    raise TypeError(f"no response message for {event!r}")


def from_response(response: pb.GenerateResponse) -> events.Event:
    """The event that ``response`` carries; raises ``Internal`` where this version knows none in it."""
    match response.WhichOneof("event"):
        case "admitted":
            return from_message(events.Admitted, response.admitted)
        case "snapshot":
            return from_message(events.Snapshot, response.snapshot, sample=response.sample)
        case "delta":
            return from_message(events.Delta, response.delta, sample=response.sample)
        case "finished":
            reason = REASONS.get(response.finished.reason, "unspecified")
            return from_message(events.Finished, response.finished, sample=response.sample, reason=reason)
    raise Internal("the server sent an event that this client does not know", error_id="")
