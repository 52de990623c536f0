"""Conversion of a session's requests and responses from and to messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from google.rpc import code_pb2

from mmserve.core.events import Event
from mmserve.core.session import Alert, Asked, FrameSampling, Memory, PushFailed, Statistics
from mmserve.core.values import wrong
from mmserve.encode.sampling import FixedRate, Sampler, Scene, SlowFast
from mmserve.errors import FieldViolation, Internal, InvalidArgument, MMServeError, ResourceExhausted
from mmserve.rpc.decision_messages import response_of
from mmserve.rpc.video_questions import SessionQuestions
from mmserve.v1 import video_pb2 as pb
from mmserve.video import messages as m
from mmserve.video.alerts import Rule
from mmserve.video.base import Scope
from mmserve.video.clock import clock_seconds
from mmserve.wire.enums import OVERLOADS
from mmserve.wire.events import to_response
from mmserve.wire.plain import from_message, to_message
from mmserve.wire.policies import options_of
from mmserve.wire.request_id import MAX_CHARACTERS, is_label

#: Maximum characters of an error's texts, and maximum number of fields that it names.
_MESSAGE_CHARACTERS, _WRONG_FIELDS = 2000, 16
#: Minimum length of a configuration's ``open_id``, which must be unguessable.
_OPEN_ID = 16
#: Maximum bytes of a request without a push.
MAX_OTHER_BYTES = 1 << 20


def parse_memory(memory: pb.StreamMemory) -> Memory:
    """The memory settings of a session; names are checked when the stream is opened."""
    texts = {name: getattr(memory, name) or getattr(Memory, name) for name in ("policy", "positions")}
    return from_message(Memory, memory, **texts)


def parse_overload(config: pb.ConfigureSession) -> str:
    """The overload policy for frames that arrive too fast."""
    return OVERLOADS.get(config.overload, "block")


def parse_sampler(sampler: pb.FrameSampler) -> Sampler:
    """The sampler for frames of segments; ``sampler`` must be valid by ``wrong_config``."""
    asked = from_message(FrameSampling, sampler)
    chosen: FixedRate | Scene = FixedRate(asked.rate)
    if asked.scene_similarity is not None:
        chosen = Scene(asked.rate, asked.scene_frames, asked.scene_similarity)
    return chosen if asked.detail_every is None else SlowFast(chosen, asked.detail_every)


def wrong_config(config: pb.ConfigureSession) -> Iterator[FieldViolation]:
    """The violations in the numbers of a configuration, and in its size, which is bounded as a session stores it."""
    if config.ByteSize() > MAX_OTHER_BYTES:
        yield FieldViolation("configure", f"must be at most {MAX_OTHER_BYTES} bytes")
    if config.open_id and not (is_label(config.open_id) and len(config.open_id) >= _OPEN_ID):
        yield FieldViolation("open_id", f"must be {_OPEN_ID} to {MAX_CHARACTERS} printable ASCII characters")
    for name, rule in wrong(FrameSampling, options_of(config.sampler)):
        yield FieldViolation(f"sampler.{name}", rule)
    if config.sampler.HasField("scene_frames") and not config.sampler.HasField("scene_similarity"):
        yield FieldViolation("sampler.scene_frames", "needs scene_similarity")
    if config.overload and config.overload not in OVERLOADS:
        yield FieldViolation("overload", "must be OVERLOAD_POLICY_BLOCK, _DROP_OLDEST or _THIN")


def to_session_request(message: pb.SessionRequest, questions: SessionQuestions) -> m.SessionRequest | None:
    """The plain form of a request after the first; None for an empty one, and for a kind unknown to this version.

    Raises ``InvalidArgument`` for invalid names, and for messages that are too large. Other errors of a question are
    raised when its engine request is created.
    """
    kind = message.WhichOneof("request")
    if kind is None:
        return None
    if kind in ("ask", "decide"):
        return _question(getattr(message, kind), kind, questions)
    if kind not in ("push_image", "push_segment", "watch") and message.ByteSize() > MAX_OTHER_BYTES:
        raise InvalidArgument.of(kind, f"must be at most {MAX_OTHER_BYTES} bytes")
    match kind:
        case "push_image":
            image = message.push_image
            return m.PushImage(image.data, image.seconds, image.url)
        case "push_segment":
            segment = message.push_segment
            start = segment.start_seconds if segment.HasField("start_seconds") else None
            return m.PushSegment(segment.data, segment.init, start, segment.url)
        case "cancel_ask":
            return m.CancelAsk(_name(message.cancel_ask.question_id, "cancel_ask.question_id"))
        case "watch":
            return _watch(message.watch)
        case "unwatch":
            return m.Unwatch(_name(message.unwatch.watch_id, "unwatch.watch_id"))
        case "get_statistics":
            return m.GetStatistics()
        case "close":
            return m.Close()
    raise InvalidArgument.of(kind, "must be the first request of a connection")


def _question(asked: pb.Ask | pb.Decide, path: str, questions: SessionQuestions) -> m.Ask | m.Decide:
    name = _name(asked.question_id, f"{path}.question_id")
    try:
        if asked.ByteSize() > MAX_OTHER_BYTES:
            raise InvalidArgument.of(path, f"must be at most {MAX_OTHER_BYTES} bytes")
        scope = _scope(asked, path)
    except InvalidArgument as error:
        refusal = error.with_traceback(None)  # whose frames hold the message

        def refuse() -> NoReturn:
            raise refusal

        return m.Ask(name, refuse) if isinstance(asked, pb.Ask) else m.Decide(name, refuse)
    if isinstance(asked, pb.Ask):
        return m.Ask(name, lambda: questions.free(asked), scope, questions.converted)
    return m.Decide(name, lambda: questions.typed(asked), scope)


def _watch(watch: pb.Watch) -> m.Watch:
    name = _name(watch.watch_id, "watch.watch_id")
    if watch.ByteSize() > MAX_OTHER_BYTES:
        error = InvalidArgument.of("watch", f"must be at most {MAX_OTHER_BYTES} bytes")
        return m.Watch(name, "", error=error)
    given = {
        "on": "on_threshold",
        "off": "off_threshold",
        "interval": "min_interval_seconds",
        "frames": "frames",
        "mass": "min_mass",
    }
    rule = Rule(**{key: getattr(watch, field) for key, field in given.items() if watch.HasField(field)})
    if watch.WhichOneof("kind") != "choices":
        return m.Watch(name, watch.text, rule=rule)
    return m.Watch(name, watch.text, tuple(watch.choices.options), watch.choices.wanted, rule)


def _scope(ask: pb.Ask | pb.Decide, path: str) -> Scope | None:
    match ask.WhichOneof("scope"):
        case "interval":
            interval = ask.interval
            begin = clock_seconds(interval.begin_seconds, f"{path}.interval.begin_seconds")
            end = clock_seconds(interval.end_seconds, f"{path}.interval.end_seconds")
            if interval.HasField("begin_seconds") and interval.HasField("end_seconds") and end < begin:
                raise InvalidArgument.of(f"{path}.interval", f"ends at {end:g} s, before it begins at {begin:g} s")
            return Scope(
                begin if interval.HasField("begin_seconds") else None, end if interval.HasField("end_seconds") else None
            )
        case "everything":
            return Scope()
    return None


def _name(value: str, field: str) -> str:
    if not is_label(value):
        raise InvalidArgument.of(field, f"must be 1 to {MAX_CHARACTERS} printable ASCII characters")
    return value


def to_session_response(index: int, response: m.Numbered | m.Unnumbered) -> pb.SessionResponse:
    """The message of ``response``."""
    match response:
        case m.Acknowledged(taken, credit):
            given = pb.Credit(pushes=max(0, credit.pushes), bytes=max(0, credit.bytes))
            return pb.SessionResponse(acknowledged=pb.Acknowledged(index=taken, credit=given))
        case m.GoAway():
            return pb.SessionResponse(go_away=to_message(response, pb.GoAway()))
        case m.FramesTaken():
            return pb.SessionResponse(index=index, frames_taken=to_message(response, pb.FramesTaken()))
        case PushFailed(of, error):
            return pb.SessionResponse(index=index, push_failed=pb.PushFailed(request_index=of, error=_error(error)))
        case m.Answer(question_id, event, moments):
            answer = _answer(question_id, event)
            for moment in moments:
                answer.moments.add(
                    begin=moment.start, end=moment.end, seconds=moment.seconds, ambiguous=moment.ambiguous
                )
            return pb.SessionResponse(index=index, answer=answer)
        case m.Decided(question_id, typed, finished, total):
            decided = response_of(typed.request.model, typed.ids, typed.questions, finished, total)
            return pb.SessionResponse(index=index, answer=pb.AnswerEvent(question_id=question_id, decided=decided))
        case Alert():
            return pb.SessionResponse(index=index, alert=to_message(response, pb.Alert()))
        case m.WatchState(watch_id, accepted, error):
            state = pb.WatchState(watch_id=watch_id)
            if error is not None:
                state.error.CopyFrom(_error(error))
            elif accepted:
                state.accepted.SetInParent()
            else:
                state.removed.SetInParent()
            return pb.SessionResponse(index=index, watch_state=state)
        case Statistics():
            return pb.SessionResponse(index=index, statistics=to_message(response, pb.SessionStatistics()))
        case m.Closed():
            return pb.SessionResponse(index=index, closed=pb.SessionClosed())
    raise TypeError(f"no message for {response!r}")


def _answer(question_id: str, event: Asked | Event | MMServeError) -> pb.AnswerEvent:
    match event:
        case Asked():
            return pb.AnswerEvent(question_id=question_id, asked=to_message(event, pb.Asked()))
        case MMServeError():
            return pb.AnswerEvent(question_id=question_id, error=_error(event))
    return pb.AnswerEvent(question_id=question_id, response=to_response(event, question_id))


def _error(error: MMServeError) -> pb.SessionError:
    message = pb.SessionError(code=code_pb2.Code.Value(error.code), message=error.message[:_MESSAGE_CHARACTERS])
    if isinstance(error, InvalidArgument):
        for each in error.violations[:_WRONG_FIELDS]:
            description = each.description[:_MESSAGE_CHARACTERS]
            message.wrong_fields.add(field=each.field[:_MESSAGE_CHARACTERS], description=description)
    elif isinstance(error, ResourceExhausted) and error.retry_after is not None:
        message.retry_after_seconds = error.retry_after
    elif isinstance(error, Internal):
        message.error_id = error.error_id
    return message
