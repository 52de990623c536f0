"""Creates request messages from the arguments of ``generate`` and ``stream``."""

from __future__ import annotations

import difflib
import io
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import PIL.Image

from mmserve.client.options import Chat, Image, Options, Video
from mmserve.client.outgoing_constraint import put_constraint
from mmserve.client.schemas import Schema
from mmserve.client.tools import put_tools, tool_call
from mmserve.core.media_id import is_media_id, is_url
from mmserve.core.options import AMOUNTS, DIFFUSION, PIXELS, SAMPLING
from mmserve.core.request import ImagePart, Message, Part, SeedCanvas, TextPart, TokensPart, VideoPart, VideoSampling
from mmserve.errors import InvalidArgument
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire import request_id
from mmserve.wire.enums import ROLES, number_of
from mmserve.wire.plain import put
from mmserve.wire.policies import put_policy, put_quality

UPLOAD_CHUNK = 1 << 20


def build_request(
    prompt: str | Sequence[Chat],
    images: Sequence[Image],
    *,
    deltas: bool,
    snapshots: bool,
    drafts: bool = False,
    prefilled: bool = False,
    schema: Schema | None = None,
    **options: Unpack[Options],
) -> pb.GenerateRequest:
    """The message for these arguments; ``images``, then ``videos``, go in front of the last message's text.

    Raises ``InvalidArgument`` for what cannot be put into a message, ``TypeError`` for an option that does not exist,
    ``OSError`` for an unreadable file.
    """
    _check_names(options)
    videos, sampling = options.get("videos") or (), options.get("video_sampling")
    request = pb.GenerateRequest(messages=_messages(prompt, images, videos, sampling))
    named = {name: options.get(name) for name in ("model", "raw", "continue_final_message", "slo_class", "adapter")}
    put(request, "", **named)
    if template := options.get("template_options"):
        request.template_options = json_text("template_options", template)
    put(request.sampling, "sampling.", **_named(options, [n for n in SAMPLING if n not in ("stop", "logit_bias")]))
    try:
        request.sampling.logit_bias.update(options.get("logit_bias") or {})
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument.of("sampling.logit_bias", f"must map ids of tokens to numbers: {error}") from error
    stop = options.get("stop") or ()
    for i, text in enumerate([stop] if isinstance(stop, str) else stop):
        if not isinstance(text, str):
            raise InvalidArgument.of(f"sampling.stop[{i}]", f"must be a string, not {text!r}")
        request.sampling.stop.append(text)
    put(request.diffusion, "diffusion.", **_named(options, DIFFUSION))
    if (seed := options.get("seed_canvas")) is not None:
        request.diffusion.seed_canvas.SetInParent()
        put_seed(request.diffusion.seed_canvas, seed)
    put_policy(request.diffusion, "recompute", options.get("recompute"), "diffusion.")
    put_policy(request.diffusion, "commit", options.get("commit"), "diffusion.")
    put_quality(request.diffusion, options.get("quality"))
    put_constraint(
        request,
        {"schema": schema, **_named(options, ("regex", "choices", "grammar", "template"))},
        mode=options.get("constraint_mode"),
        sampling=options.get("constraint_sampling"),
        schema_options=options.get("schema_options") or (),
    )
    put_tools(
        request,
        options.get("tools"),
        options.get("tool_choice"),
        options.get("allowed_tools") or (),
        parallel=options.get("parallel_tool_calls"),
    )
    put_policy(request.vision, "pruner", options.get("pruner"), "vision.")
    amounts = _named(options, AMOUNTS)
    if sum(value is not None for value in amounts.values()) > 1:
        raise InvalidArgument.of("vision", f"at most one of {', '.join(amounts)} can be set")
    put(request.vision, "vision.", **amounts)
    put(request.vision, "vision.", **_named(options, PIXELS))
    put_policy(request.kv_reduction, "policy", options.get("kv_reduction"), "kv_reduction.")
    put_policy(request.image_reuse, "policy", options.get("image_reuse"), "image_reuse.")
    request.stream.deltas, request.stream.snapshots = deltas, snapshots
    request.stream.tokens, request.stream.drafts = bool(options.get("tokens")), drafts
    request.stream.prefilled, request.stream.prompt = prefilled, bool(options.get("return_prompt"))
    request.stream.prompt_tokens = bool(options.get("prompt_tokens"))
    put(request.stream, "stream.", **_named(options, ("alternatives", "prompt_alternatives")))
    return request


def put_seed(message: pb.SeedCanvas, seed: SeedCanvas) -> None:
    """Copy the ids and positions of ``seed`` to ``message``; raises ``InvalidArgument`` for invalid ones."""
    for name in ("tokens", "pinned"):
        try:
            getattr(message, name).extend(getattr(seed, name))
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidArgument.of(f"diffusion.seed_canvas.{name}", f"must hold numbers from 0: {error}") from error


def json_text(field: str, value: Mapping[str, Any]) -> str:
    """``value`` as JSON; raises ``InvalidArgument`` if it is not a JSON object."""
    try:
        if isinstance(value, Mapping):
            return json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument.of(field, f"must be JSON: {error}") from error
    raise InvalidArgument.of(field, f"must map names to JSON values, not {value!r}"[:200])


def _named(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: options.get(name) for name in names}


def _check_names(options: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` for an option that does not exist."""
    known = Options.__annotations__
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise TypeError(f"there is no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def file_bytes(image: Any, where: str) -> bytes:
    """The encoded file of an image given as bytes, path or PIL image (which becomes a PNG)."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, Path):
        return image.read_bytes()
    if isinstance(image, PIL.Image.Image):
        file = io.BytesIO()
        (image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else image.convert("RGB")).save(file, "PNG")
        return file.getvalue()
    raise InvalidArgument.of(where, "must be bytes, a pathlib.Path, a PIL image, a media id 'sha256:…' or a URL")


def request_label(given: str | None) -> str:
    """``given``, or a new id; raises ``InvalidArgument`` for a label that a server would reject."""
    if given is None:
        return uuid.uuid4().hex
    if not request_id.is_label(given):
        raise InvalidArgument.of("request_id", "must be 1 to 128 printable ASCII characters")
    return given


def _messages(
    prompt: str | Sequence[Chat], images: Sequence[Image], videos: Sequence[Video], sampling: VideoSampling | None
) -> list[pb.ChatMessage]:
    chats: Sequence[Chat] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    for name, given in (("messages", chats), ("images", images), ("videos", videos)):
        if not isinstance(given, Iterable) or isinstance(given, str | bytes | bytearray | memoryview | Mapping):
            what = "a text, or a list of messages" if name == "messages" else "a list"
            raise InvalidArgument.of(name, f"must be {what}, not {given!r}"[:200])
    messages = [_message(chat, f"messages[{i}]") for i, chat in enumerate(chats)]
    if images or videos:
        if not messages:
            raise InvalidArgument.of("messages", "must hold at least one message")
        parts = [pb.ContentPart(image=_image(image, f"images[{i}]")) for i, image in enumerate(images)]
        parts += [pb.ContentPart(video=_video(video, sampling, f"videos[{i}]")) for i, video in enumerate(videos)]
        last = messages[-1]
        messages[-1] = pb.ChatMessage(role=last.role, parts=[*parts, *last.parts])
    return messages


def _message(chat: Chat, where: str) -> pb.ChatMessage:
    if isinstance(chat, Message):
        return _chat_message(chat, [_part(part, where) for part in chat.parts])
    given = {"role", "content"}
    if not isinstance(chat, Mapping) or not given <= set(chat) <= given | {"tool_calls", "tool_call_id"}:
        why = "must be a Message, or a mapping of 'role' and 'content', and maybe 'tool_calls' or 'tool_call_id'"
        raise InvalidArgument.of(where, why)
    calls = tuple(tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(chat.get("tool_calls") or ()))
    content = chat["content"] or ("" if calls else chat["content"])
    if not isinstance(content, str):
        raise InvalidArgument.of(
            where, "must have a text as its content; Message(role, parts) can have images and videos"
        )
    parts = [_part(TextPart(content), where)] if content or not calls else []
    return _chat_message(Message(chat["role"], (), calls, chat.get("tool_call_id") or ""), parts)


def _chat_message(chat: Message, parts: list[pb.ContentPart]) -> pb.ChatMessage:
    calls = [pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in chat.tool_calls]
    return pb.ChatMessage(role=_role(chat.role), parts=parts, tool_calls=calls, tool_call_id=chat.tool_call_id)


def _role(name: str) -> Any:
    return number_of(ROLES, name, "messages.role")


def _part(part: Part, where: str) -> pb.ContentPart:
    try:
        if isinstance(part, ImagePart):
            return pb.ContentPart(image=pb.Image(data=part.data))
        if isinstance(part, VideoPart):
            return pb.ContentPart(video=_sampled(pb.Video(data=part.data), part.sampling, where))
        if isinstance(part, TokensPart):
            return pb.ContentPart(tokens=pb.TokenIds(ids=part.ids))
        return pb.ContentPart(text=part.text)
    except (TypeError, ValueError) as error:
        raise InvalidArgument.of(where, f"cannot be sent: {error}") from error


def _image(image: Image, where: str) -> pb.Image:
    if isinstance(image, str):
        return pb.Image(**_named_file(image, where))
    return pb.Image(data=file_bytes(image, where))


def _video(video: Video, sampling: VideoSampling | None, where: str) -> pb.Video:
    if isinstance(video, str):
        message = pb.Video(**_named_file(video, where))
    elif isinstance(video, Path):
        message = pb.Video(data=video.read_bytes())
    elif isinstance(video, bytes | bytearray | memoryview):
        message = pb.Video(data=bytes(video))
    else:
        raise InvalidArgument.of(where, "must be bytes, a pathlib.Path, a media id 'sha256:…' or a URL")
    return _sampled(message, sampling, "video_sampling")


def _named_file(given: str, where: str) -> dict[str, Any]:
    """The message field for a media id or a URL."""
    if is_url(given):
        return {"url": given}
    if not is_media_id(given):
        why = "a string must be a media id 'sha256:…' or an http(s) URL; for a file, give a pathlib.Path"
        raise InvalidArgument.of(where, why)
    return {"media_id": given}


def _sampled(video: pb.Video, sampling: VideoSampling | None, where: str) -> pb.Video:
    if sampling is None:
        return video
    if not isinstance(sampling, VideoSampling):
        raise InvalidArgument.of(where, f"must be a VideoSampling, not {sampling!r}")
    put(video.sampling, f"{where}.", **vars(sampling))
    return video
