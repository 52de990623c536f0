"""What both clients share: arguments to a request message, events to a result, and channels."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

import grpc
import PIL.Image

from mmserve.core import events
from mmserve.core.request import ImagePart, Message, Part, TextPart, VideoPart
from mmserve.encode.store import is_media_id
from mmserve.errors import InvalidArgument, Unavailable
from mmserve.rpc import request_id
from mmserve.rpc.default_policies import put_quality
from mmserve.rpc.outgoing_constraint import Schema, Template, put_constraint, reader
from mmserve.rpc.policies import Commit, ImageReuse, KvReduction, Pruner, Quality, Recompute, put, put_policy
from mmserve.rpc.roles import role_number
from mmserve.v1 import generation_pb2 as pb

#: An image: the bytes of its file, the file's path, a picture in memory, or the id of an upload.
Image = bytes | Path | PIL.Image.Image | str
#: A video: the bytes of its file, the file's path, or the id of an upload.
Video = bytes | Path | str
#: A chat message: typed, or ``{"role": …, "content": …}``.
Chat = Message | Mapping[str, str]

UPLOAD_CHUNK = 1 << 20


class Options(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``stream``; what is left out takes the model's default."""

    model: str | None
    max_new_tokens: int | None
    temperature: float | None  # 0 = greedy
    top_p: float | None  # (0, 1]
    top_k: int | None  # 0 = every token
    min_p: float | None  # [0, 1]; 0 = every token
    repetition_penalty: float | None  # 1 = none
    seed: int | None
    n: int | None  # samples of the answer; default 1
    stop: str | Sequence[str]
    steps: int | None
    block_length: int | None
    recompute: Recompute | None
    commit: Commit | None
    quality: Quality | None  # what both policies are chosen for where neither is named; default "balanced"
    tokens: bool  # the answer's tokens with their log-probabilities, in the result
    videos: Sequence[Video]  # in front of the last message's text, behind the images
    schema: Schema | None  # the answer is JSON valid under it, and ``parsed`` in the result; at most one of these five
    regex: str | None  # all of the answer matches it
    choices: Sequence[str] | None  # the answer is one of them
    grammar: str | None  # the answer is a sentence of it: Lark, or GBNF
    template: Template | None  # the answer is these texts with the holes filled, which are ``holes`` in the result
    scaffold: bool  # with ``schema``: keys and punctuation stand on a diffusion model's canvas from the start
    pruner: Pruner | None  # of visual tokens; with one of the three below
    keep_ratio: float | None  # share of the visual tokens of each image or video to keep, in (0, 1]
    token_budget: int | None  # so many of them
    attention_mass: float | None  # as many as draw this share of the attention
    kv_reduction: KvReduction | None  # which K/V an autoregressive model keeps while it decodes; default all
    image_reuse: ImageReuse | None  # which K/V of images it takes from where they stood alone; default none
    constraint_mode: str | None  # for what no grammar can enforce: "strict" (default), "validate" or "lenient"
    constraint_sampling: str | None  # what drawn answers are draws from: "mask" (default), "awrs" or "asap"


@dataclass(frozen=True, kw_only=True)
class TLS:
    """How to trust the server (``ca``: PEM bytes or file, None = the system's) and who the client is (mTLS)."""

    ca: bytes | Path | None = None
    certificate: bytes | Path | None = None
    key: bytes | Path | None = None
    server_name: str | None = None  # name in the server's certificate, where it is not the target's host


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished answer; ``finish_reason`` is ``end``, ``stop`` or ``length``, ``times`` are milliseconds.

    Of a request for several samples it is the first; ``samples`` are all of them.
    """

    text: str
    finish_reason: str
    usage: events.Usage
    forwards: int
    tokens_per_forward: float
    recomputed_tokens: int
    times: events.StageTimes
    warnings: tuple[str, ...]
    edits: int
    tokens: tuple[events.CommittedToken, ...]
    request_id: str
    closed_by_budget: bool = False  # a constrained answer was made shorter than the model's, so that it ends in time
    companion_forwards: int = 0  # passes of a companion, which ``forwards`` does not count
    log_weight: float | None = None  # importance weight (natural log) of an answer drawn by "awrs" or "asap"
    constraint: events.ConstraintStats | None = None  # what its constraint took, if it had one
    holes: tuple[str, ...] = ()  # what fills each hole of a ``template``; none where a stop string cut the answer
    others: tuple[Result, ...] = ()  # the samples behind the first
    read: Callable[[str], Any] | None = field(default=None, repr=False, compare=False)  # of an answer to a ``schema``

    @property
    def samples(self) -> tuple[Result, ...]:
        """Every sample in order, this one first."""
        return (self, *self.others)

    @property
    def parsed(self) -> Any:
        """The answer to a request with ``schema``: a value, or an instance of its class; None without one, and where a
        stop string cut the answer. Raises what the class raises, if it asks for more than its schema says."""
        return None if self.read is None or self.finish_reason == "stop" else self.read(self.text)


def to_result(done: Sequence[events.Finished], samples: int, request_id: str, schema: Schema | None = None) -> Result:
    """The result in what a stream of ``samples`` finished with, in any order; raises ``Unavailable`` where one is
    missing. ``schema``: the request's."""
    if sorted(event.sample for event in done) != list(range(samples)):
        raise Unavailable("the server ended the stream without an answer")
    read = reader(schema)
    first, *others = (_result(event, request_id, read) for event in sorted(done, key=lambda event: event.sample))
    return replace(first, others=tuple(others))


def _result(event: events.Finished, request_id: str, read: Callable[[str], Any] | None) -> Result:
    return Result(
        text=event.text,
        finish_reason=event.reason,
        usage=event.usage,
        forwards=event.forwards,
        tokens_per_forward=event.tokens_per_forward,
        recomputed_tokens=event.recomputed_tokens,
        times=event.times,
        warnings=event.warnings,
        edits=event.edits,
        tokens=event.tokens,
        request_id=request_id,
        closed_by_budget=event.closed_by_budget,
        companion_forwards=event.companion_forwards,
        log_weight=event.log_weight,
        constraint=event.constraint,
        holes=event.holes,
        read=read,
    )


def build_request(
    prompt: str | Sequence[Chat],
    images: Sequence[Image],
    *,
    deltas: bool,
    snapshots: bool,
    model: str | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] = (),
    steps: int | None = None,
    block_length: int | None = None,
    recompute: Recompute | None = None,
    commit: Commit | None = None,
    quality: Quality | None = None,
    tokens: bool = False,
    videos: Sequence[Video] = (),
    schema: Schema | None = None,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
    grammar: str | None = None,
    template: Template | None = None,
    scaffold: bool = False,
    constraint_mode: str | None = None,
    constraint_sampling: str | None = None,
    pruner: Pruner | None = None,
    keep_ratio: float | None = None,
    token_budget: int | None = None,
    attention_mass: float | None = None,
    kv_reduction: KvReduction | None = None,
    image_reuse: ImageReuse | None = None,
) -> pb.GenerateRequest:
    """The message for these arguments; ``images``, then ``videos``, go in front of the last message's text.

    Raises ``InvalidArgument`` for what cannot be put into a message, ``OSError`` for an unreadable file.
    """
    request = pb.GenerateRequest(messages=_messages(prompt, images, videos))
    put(request, "", model=model)
    sampling = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "n": n,
    }
    put(request.sampling, "sampling.", **sampling)
    for i, text in enumerate([stop] if isinstance(stop, str) else stop):
        if not isinstance(text, str):
            raise InvalidArgument.of(f"sampling.stop[{i}]", f"must be a string, not {text!r}")
        request.sampling.stop.append(text)
    put(request.diffusion, "diffusion.", steps=steps, block_length=block_length)
    put_policy(request.diffusion, "recompute", recompute, "diffusion.")
    put_policy(request.diffusion, "commit", commit, "diffusion.")
    put_quality(request.diffusion, quality)
    given = {"schema": schema, "regex": regex, "choices": choices, "grammar": grammar, "template": template}
    put_constraint(request, given, mode=constraint_mode, sampling=constraint_sampling, scaffold=scaffold)
    put_policy(request.vision, "pruner", pruner, "vision.")
    amounts = {"keep_ratio": keep_ratio, "token_budget": token_budget, "attention_mass": attention_mass}
    if sum(value is not None for value in amounts.values()) > 1:
        raise InvalidArgument.of("vision", f"at most one of {', '.join(amounts)} can be set")
    put(request.vision, "vision.", **amounts)
    put_policy(request.kv_reduction, "policy", kv_reduction, "kv_reduction.")
    put_policy(request.image_reuse, "policy", image_reuse, "image_reuse.")
    request.stream.deltas, request.stream.snapshots, request.stream.tokens = deltas, snapshots, tokens
    return request


def file_bytes(image: Any, where: str) -> bytes:
    """The encoded file of an image given as bytes, path or picture (which becomes a PNG)."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, Path):
        return image.read_bytes()
    if isinstance(image, PIL.Image.Image):
        file = io.BytesIO()
        (image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else image.convert("RGB")).save(file, "PNG")
        return file.getvalue()
    raise InvalidArgument.of(where, "must be bytes, a pathlib.Path, a PIL image or a media id 'sha256:…'")


def request_label(given: str | None) -> str:
    """``given``, or a fresh id; raises ``InvalidArgument`` for what a server would not accept."""
    if given is None:
        return uuid.uuid4().hex
    if not request_id.is_label(given):
        raise InvalidArgument.of("request_id", "must be 1 to 128 printable ASCII characters")
    return given


def call_metadata(token: str | None, label: str | None = None) -> list[tuple[str, str]]:
    """The metadata of a call."""
    pairs = [("authorization", f"Bearer {token}")] if token else []
    return [*pairs, (request_id.KEY, label)] if label else pairs


def channel_options(tls: TLS | bool | None) -> list[tuple[str, int | str]]:
    """Options of a client's channel; message sizes are the server's to limit."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.use_local_subchannel_pool", 1),  # one client's failed connection is not another's
    ]
    if isinstance(tls, TLS) and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def channel_credentials(tls: TLS | bool | None) -> Any:
    """The channel credentials for ``tls``; None = not encrypted."""
    if not tls:
        return None
    chosen = tls if isinstance(tls, TLS) else TLS()
    return grpc.ssl_channel_credentials(_pem(chosen.ca), _pem(chosen.key), _pem(chosen.certificate))


def _messages(prompt: str | Sequence[Chat], images: Sequence[Image], videos: Sequence[Video]) -> list[pb.ChatMessage]:
    chats: Sequence[Chat] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [_message(chat, f"messages[{i}]") for i, chat in enumerate(chats)]
    if images or videos:
        if not messages:
            raise InvalidArgument.of("messages", "must hold at least one message")
        parts = [pb.ContentPart(image=_image(image, f"images[{i}]")) for i, image in enumerate(images)]
        parts += [pb.ContentPart(video=_video(video, f"videos[{i}]")) for i, video in enumerate(videos)]
        last = messages[-1]
        messages[-1] = pb.ChatMessage(role=last.role, parts=[*parts, *last.parts])
    return messages


def _message(chat: Chat, where: str) -> pb.ChatMessage:
    if isinstance(chat, Message):
        return pb.ChatMessage(role=_role(chat.role), parts=[_part(part, where) for part in chat.parts])
    if not isinstance(chat, Mapping) or set(chat) != {"role", "content"}:
        raise InvalidArgument.of(where, "must be a Message, or a mapping with the keys 'role' and 'content'")
    return pb.ChatMessage(role=_role(chat["role"]), parts=[_part(TextPart(chat["content"]), where)])


def _role(name: str) -> Any:
    return role_number(name)


def _part(part: Part, where: str) -> pb.ContentPart:
    try:
        if isinstance(part, ImagePart):
            return pb.ContentPart(image=pb.Image(data=part.data))
        if isinstance(part, VideoPart):
            return pb.ContentPart(video=pb.Video(data=part.data))
        return pb.ContentPart(text=part.text)
    except (TypeError, ValueError) as error:
        raise InvalidArgument.of(where, f"cannot be sent: {error}") from error


def _image(image: Image, where: str) -> pb.Image:
    if isinstance(image, str):
        if not is_media_id(image):
            raise InvalidArgument.of(where, "a string must be a media id 'sha256:…'; for a file, give a pathlib.Path")
        return pb.Image(media_id=image)
    return pb.Image(data=file_bytes(image, where))


def _video(video: Video, where: str) -> pb.Video:
    if isinstance(video, str):
        if not is_media_id(video):
            raise InvalidArgument.of(where, "a string must be a media id 'sha256:…'; for a file, give a pathlib.Path")
        return pb.Video(media_id=video)
    if isinstance(video, Path):
        return pb.Video(data=video.read_bytes())
    if isinstance(video, bytes | bytearray | memoryview):
        return pb.Video(data=bytes(video))
    raise InvalidArgument.of(where, "must be bytes, a pathlib.Path or a media id 'sha256:…'")


def _pem(source: bytes | Path | None) -> bytes | None:
    return source.read_bytes() if isinstance(source, Path) else source
