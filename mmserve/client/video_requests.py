"""Creates the messages of a session's requests from the caller's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from mmserve.client.decisions import TypedQuestion, build_decision
from mmserve.client.options import Options
from mmserve.client.outgoing import build_request
from mmserve.client.session_options import SessionOptions
from mmserve.core.media_id import is_url
from mmserve.core.options import AMOUNTS, DIFFUSION, PIXELS, SAMPLING
from mmserve.core.session import FrameSampling, Memory
from mmserve.core.values import values
from mmserve.errors import InvalidArgument
from mmserve.v1 import video_pb2 as pb
from mmserve.wire.enums import OVERLOADS, number_of
from mmserve.wire.plain import put
from mmserve.wire.policies import put_policy

#: Options of a session that are fields of ``StreamMemory`` and ``FrameSampler``, by their names there.
_MEMORY = {"policy": "memory", **{name: name for name in values(Memory) if name != "policy"}}
_SAMPLER = {name: name for name in values(FrameSampling)}
#: Options of questions that a session can have as defaults, and options of its frames.
_DEFAULTS = {*SAMPLING, *DIFFUSION, "seed_canvas", "recompute", "commit", "quality"}
_OF_FRAMES = ("model", "videos", "video_sampling", "pruner", *AMOUNTS, *PIXELS)


@dataclass(frozen=True)
class Push:
    """A push, as keyword argument of ``SessionState.enqueue``, and its bytes for credit."""

    request: dict[str, Any]
    size: int


def image_push(image: bytes | str, seconds: float) -> Push:
    """One image, which is one frame: the bytes of its file, or a URL that the server downloads."""
    return _push("push_image", pb.PushImage(seconds=seconds), image)


def segment_push(file: bytes | str, start: float | None, init: bytes) -> Push:
    """A segment of encoded video: its bytes, or a URL."""
    return _push("push_segment", pb.PushSegment(init=init, start_seconds=start), file)


def _push(kind: str, message: pb.PushImage | pb.PushSegment, file: bytes | str) -> Push:
    if not isinstance(file, str):
        message.data = file
    elif is_url(file):
        message.url = file
    else:
        raise InvalidArgument.of(
            f"{kind}.url", f"must be an http or https URL, not {file[:100]!r}: pass a file as a Path"
        )
    return Push({kind: message}, push_bytes(pb.SessionRequest(**{kind: message})))


def configuration(**options: Unpack[SessionOptions]) -> pb.ConfigureSession:
    """The message that opens a session, with the options of ``generate`` that can be defaults of questions.

    Raises ``InvalidArgument`` for invalid values, ``TypeError`` for an option that does not exist.
    """
    given: dict[str, Any] = dict(options)
    config = pb.ConfigureSession()
    put(config, "", model=given.pop("model", None))
    for part, names in (("memory", _MEMORY), ("sampler", _SAMPLER), ("vision", {name: name for name in AMOUNTS})):
        put(getattr(config, part), f"{part}.", **{name: given.pop(own, None) for name, own in names.items()})
    config.overload = number_of(OVERLOADS, given.pop("overload", None) or "block", "overload")
    put_policy(config.vision, "pruner", given.pop("pruner", None), "vision.")
    for name, value in given.items():
        if value and (name in Options.__annotations__ or name == "schema") and name not in _DEFAULTS:
            raise InvalidArgument.of(name, "is not an option of a session")
    defaults = build_request("", (), deltas=True, snapshots=False, **given)
    if defaults.sampling.ByteSize():
        config.sampling.CopyFrom(defaults.sampling)
    if defaults.diffusion.ByteSize():
        config.diffusion.CopyFrom(defaults.diffusion)
    return config


def question_message(
    question_id: str,
    text: str | Sequence[Any],
    scope: Any,
    timeout: float | None,
    *,
    schema: Any,
    snapshots: bool,
    options: Mapping[str, Any],
) -> pb.Ask:
    """The message of a question; ``scope``: "now", "all", or (begin, end) in seconds, either of them None."""
    for name in _OF_FRAMES:
        if options.get(name):
            raise InvalidArgument.of(name, "is not an option of a question about a session")
    request = build_request(text, (), deltas=True, snapshots=snapshots, schema=schema, **options)
    request.ClearField("vision")
    for name in ("sampling", "diffusion"):
        if not getattr(request, name).ByteSize():
            request.ClearField(name)  # use the session's default
    ask = pb.Ask(question_id=question_id, request=request)
    _put_scope(ask, scope, timeout)
    return ask


def decide_message(
    question_id: str,
    questions: Sequence[TypedQuestion] | Mapping[str, TypedQuestion],
    text: str | Sequence[Any],
    scope: Any,
    timeout: float | None,
) -> pb.Decide:
    """The message of typed questions; arguments as in ``question_message``."""
    made = build_decision(text, questions, (), (), None, "")
    decide = pb.Decide(question_id=question_id, messages=made.messages, questions=made.questions)
    _put_scope(decide, scope, timeout)
    return decide


def _put_scope(ask: pb.Ask | pb.Decide, scope: Any, timeout: float | None) -> None:
    """Set the ``scope`` and the timeout (seconds) of a question in its message."""
    if timeout is not None:
        ask.timeout_seconds = timeout
    match scope:
        case "now":
            ask.now.SetInParent()
        case "all":
            ask.everything.SetInParent()
        case (begin, end):
            ask.interval.SetInParent()
            put(ask.interval, "scope.", begin_seconds=begin, end_seconds=end)
        case _:
            raise InvalidArgument.of("scope", f"must be 'now', 'all' or (begin, end) in seconds, not {scope!r}")


def watch_message(
    watch_id: str,
    text: str,
    choices: Sequence[str] | None,
    wanted: str | None,
    numbers: Mapping[str, float | None],
) -> pb.Watch:
    """The message of a standing question; ``numbers``: fields by name."""
    watch = pb.Watch(watch_id=watch_id, text=text)
    if choices is not None and not choices:
        raise InvalidArgument.of("choices", "must not be empty")
    if choices is None:
        watch.yes_no.SetInParent()
    else:
        watch.choices.options.extend(choices)
        watch.choices.wanted = wanted if wanted is not None else choices[0]
    put(watch, "watch.", **numbers)
    return watch


def push_bytes(request: pb.SessionRequest) -> int:
    """Bytes of a push for credit; 0 for other requests."""
    if request.WhichOneof("request") == "push_image":
        return len(request.push_image.data) + len(request.push_image.url)
    segment = request.push_segment
    return len(segment.data) + len(segment.url) + len(segment.init)
