"""Conversion of request messages to core requests.

A message is validated completely first, so that a client gets all violations at once; only a valid one is converted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from mmserve.config import MediaConfig
from mmserve.core.info import ModelInfo, policy_unsupported
from mmserve.core.request import (
    Diffusion,
    ImagePart,
    Message,
    Part,
    Request,
    Sampling,
    Streaming,
    TextPart,
    TokensPart,
    VideoPart,
)
from mmserve.core.slo import SLO
from mmserve.core.tenant import ANONYMOUS, Tenant
from mmserve.errors import FieldViolation, InvalidArgument, Unimplemented
from mmserve.rpc.constraint_messages import parse_constraint
from mmserve.rpc.default_policies import parse_diffusion
from mmserve.rpc.tool_messages import parse_calls, parse_tools, tool_constraint
from mmserve.rpc.violations import violations
from mmserve.rpc.vision_messages import parse_video_sampling, parse_vision
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire.enums import ROLES
from mmserve.wire.plain import from_message
from mmserve.wire.policies import chosen_policy

#: Added to the logits of tokens that must not be chosen: far below any model's logits.
NEVER = -1e4


def to_request(
    message: pb.GenerateRequest,
    *,
    request_id: str,
    info: ModelInfo,
    limits: MediaConfig,
    media: Callable[[str], bytes],
    deadline: float | None,
    tenant: Tenant = ANONYMOUS,
    slo: Mapping[str, SLO] = MappingProxyType({}),
    adapter: str = "",
) -> Request:
    """The core request for the model of ``info``, with ``adapter`` as the default adapter.

    ``media`` returns the bytes of a media id or URL, or raises ``NotFound``. ``deadline``: monotonic clock (seconds);
    ``slo``: the classes that requests may name. Raises ``InvalidArgument`` with all violations, or ``Unimplemented`` if
    the model lacks a required capability.
    """
    if wrong := (*violations(message, info, limits), *_wrong_class(message, slo)):
        raise InvalidArgument(*wrong)
    sampling = _sampling(message.sampling, info)
    diffusion = parse_diffusion(message, sampling, info)
    _require_capabilities(message, diffusion, info)
    tools = parse_tools(message)
    prompt_only = message.sampling.HasField("max_new_tokens") and not message.sampling.max_new_tokens
    constraint = None if prompt_only else parse_constraint(message)
    if tools is not None and not prompt_only:
        constraint = tool_constraint(tools, info, constraint)
    return Request(
        id=request_id,
        model=info.name,
        messages=tuple(_message(m, media) for m in message.messages),
        prompt_only=prompt_only,
        raw=message.raw,
        continues=message.continue_final_message,
        template_options=message.template_options,
        sampling=sampling,
        diffusion=diffusion,
        vision=parse_vision(message.vision),
        streaming=from_message(Streaming, message.stream),
        constraint=constraint,
        tools=tools,
        kv_reduction=chosen_policy(message.kv_reduction, "policy"),
        image_reuse=chosen_policy(message.image_reuse, "policy"),
        deadline=deadline,
        tenant=tenant,
        slo=slo.get(message.slo_class),
        adapter=message.adapter or adapter,
    )


def _wrong_class(message: pb.GenerateRequest, slo: Mapping[str, SLO]) -> tuple[FieldViolation, ...]:
    if not message.slo_class or message.slo_class in slo:
        return ()
    known = f"one of {', '.join(slo)}" if slo else "empty: the server's configuration has no [slo.NAME]"
    return (FieldViolation("slo_class", f"must be {known}, not {message.slo_class[:100]!r}"),)


def _message(chat: pb.ChatMessage, media: Callable[[str], bytes]) -> Message:
    return Message(
        role=ROLES[chat.role],
        parts=tuple(_part(part, media) for part in chat.parts),
        tool_calls=parse_calls(chat),
        tool_call_id=chat.tool_call_id,
    )


def _part(part: pb.ContentPart, media: Callable[[str], bytes]) -> Part:
    match part.WhichOneof("part"):
        case "image":
            return ImagePart(_bytes(part.image, media))
        case "video":
            return VideoPart(_bytes(part.video, media), parse_video_sampling(part.video))
        case "tokens":
            return TokensPart(tuple(part.tokens.ids))
    return TextPart(part.text)


def _bytes(item: pb.Image | pb.Video, media: Callable[[str], bytes]) -> bytes:
    return item.data if item.WhichOneof("source") == "data" else media(item.media_id or item.url)


def _sampling(sampling: pb.SamplingParams, info: ModelInfo) -> Sampling:
    own = {} if sampling.HasField("max_new_tokens") else {"max_new_tokens": info.max_new_tokens}
    found = from_message(Sampling, sampling, **own)
    found = replace(found, max_new_tokens=max(1, found.max_new_tokens))  # 0: see ``Request.prompt_only``
    if not found.ignore_end:
        return found
    return replace(found, logit_bias={**found.logit_bias, **dict.fromkeys(info.end_ids, NEVER)})


def _require_capabilities(message: pb.GenerateRequest, diffusion: Diffusion, info: ModelInfo) -> None:
    calls = any(chat.tool_calls or chat.role == pb.ROLE_TOOL for chat in message.messages)
    if (message.tools or calls) and not info.tool_format:
        raise Unimplemented(
            f"model {info.name!r} takes no tools: its chat template has no format of tool calls that is known here"
        )
    for kind, taken in (("image", info.images), ("video", info.videos)):
        if not taken and any(part.HasField(kind) for chat in message.messages for part in chat.parts):
            raise Unimplemented(f"model {info.name!r} takes no {kind}s")
    for kind, policy, known in (
        ("recompute", diffusion.recompute, info.recompute_policies),
        ("commit", diffusion.commit, info.commit_policies),
    ):
        if policy.name not in known:
            raise Unimplemented(policy_unsupported(info.name, kind, policy.name, known, diffusion=info.diffusion))
