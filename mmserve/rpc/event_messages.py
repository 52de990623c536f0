"""Events as messages carry them, there and back."""

from __future__ import annotations

from dataclasses import asdict

from mmserve.core import events
from mmserve.errors import Internal
from mmserve.v1 import generation_pb2 as pb

REASONS = {pb.FINISH_REASON_END: "end", pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_REASON_NUMBERS = {name: number for number, name in REASONS.items()}


def to_response(event: events.Event, request_id: str) -> pb.GenerateResponse:
    """The response message of ``event``; a ``Failed`` has none, it becomes a status."""
    match event:
        case events.Admitted(queued_ahead):
            return pb.GenerateResponse(admitted=pb.Admitted(request_id=request_id, queued_ahead=queued_ahead))
        case events.Snapshot(text, committed, total, forwards, edited, sample):
            snapshot = pb.Snapshot(text=text, committed=committed, total=total, forwards=forwards, edited=edited)
            return pb.GenerateResponse(snapshot=snapshot, sample=sample)
        case events.Delta(text, sample):
            return pb.GenerateResponse(delta=pb.Delta(text=text), sample=sample)
        case events.Finished():
            return pb.GenerateResponse(finished=_finished(event), sample=event.sample)
    raise TypeError(f"no response message for {event!r}")


def from_response(response: pb.GenerateResponse) -> events.Event:
    """The event that ``response`` carries; raises ``Internal`` where this version knows none in it."""
    match response.WhichOneof("event"):
        case "admitted":
            return events.Admitted(response.admitted.queued_ahead)
        case "snapshot":
            s = response.snapshot
            return events.Snapshot(s.text, s.committed, s.total, s.forwards, s.edited, response.sample)
        case "delta":
            return events.Delta(response.delta.text, response.sample)
        case "finished":
            return _from_finished(response.finished, response.sample)
    raise Internal("the server sent an event that this client does not know", error_id="")


def _finished(event: events.Finished) -> pb.Finished:
    return pb.Finished(
        reason=_REASON_NUMBERS[event.reason],
        text=event.text,
        usage=pb.Usage(
            prompt_tokens=event.usage.prompt_tokens,
            visual_tokens=event.usage.visual_tokens,
            completion_tokens=event.usage.completion_tokens,
            cached_tokens=event.usage.cached_tokens,
            visual_tokens_before=event.usage.visual_tokens_before,
            kv_positions=event.usage.kv_positions,
            reused_tokens=event.usage.reused_tokens,
        ),
        forwards=event.forwards,
        tokens_per_forward=event.tokens_per_forward,
        recomputed_tokens=event.recomputed_tokens,
        times=pb.StageTimes(
            queue_ms=event.times.queue,
            encode_ms=event.times.encode,
            prefill_ms=event.times.prefill,
            decode_ms=event.times.decode,
            total_ms=event.times.total,
            first_token_ms=event.times.first_token,
        ),
        warnings=event.warnings,
        edits=event.edits,
        tokens=[
            pb.CommittedToken(id=t.id, text=t.text, log_probability=t.log_probability, step=t.step)
            for t in event.tokens
        ],
        closed_by_budget=event.closed_by_budget,
        companion_forwards=event.companion_forwards,
        log_weight=event.log_weight,
        constraint=None if event.constraint is None else pb.ConstraintStats(**asdict(event.constraint)),
        holes=event.holes,
    )


def _from_finished(message: pb.Finished, sample: int) -> events.Finished:
    usage, times = message.usage, message.times
    return events.Finished(
        reason=REASONS.get(message.reason, "unspecified"),
        text=message.text,
        usage=events.Usage(
            usage.prompt_tokens,
            usage.visual_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            usage.visual_tokens_before,
            usage.kv_positions,
            usage.reused_tokens,
        ),
        forwards=message.forwards,
        recomputed_tokens=message.recomputed_tokens,
        times=events.StageTimes(
            queue=times.queue_ms,
            encode=times.encode_ms,
            prefill=times.prefill_ms,
            decode=times.decode_ms,
            total=times.total_ms,
            first_token=times.first_token_ms,
        ),
        warnings=tuple(message.warnings),
        edits=message.edits,
        tokens=tuple(events.CommittedToken(t.id, t.text, t.log_probability, t.step) for t in message.tokens),
        sample=sample,
        closed_by_budget=message.closed_by_budget,
        companion_forwards=message.companion_forwards,
        log_weight=message.log_weight if message.HasField("log_weight") else None,
        constraint=_from_constraint(message.constraint) if message.HasField("constraint") else None,
        holes=tuple(message.holes),
    )


def _from_constraint(took: pb.ConstraintStats) -> events.ConstraintStats:
    return events.ConstraintStats(
        steps=took.steps,
        fallbacks=took.fallbacks,
        late=took.late,
        search_seconds=took.search_seconds,
        forward_seconds=took.forward_seconds,
        step_ms=tuple(took.step_ms),
    )
