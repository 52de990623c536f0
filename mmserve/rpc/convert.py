"""Between protobuf and ``mmserve.core``: with ``policy_messages``, ``constraint_messages`` and ``vision_messages``, the
only place that knows both.

A request is judged as a whole first, so that a client learns everything that is wrong with it at once; only an
acceptable one is then built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict

from google.protobuf.message import Message as ProtoMessage

from mmserve.config import MediaConfig
from mmserve.core import events
from mmserve.core.info import ModelInfo, lacking
from mmserve.core.request import (
    Diffusion,
    ImagePart,
    Message,
    Part,
    Policy,
    Request,
    Sampling,
    Streaming,
    TextPart,
    VideoPart,
)
from mmserve.encode.store import is_media_id
from mmserve.errors import FieldViolation, Internal, InvalidArgument, Unimplemented
from mmserve.rpc.constraint_messages import asked_constraint, wrong_constraint
from mmserve.rpc.policy_messages import chosen_policy, wrong_policy
from mmserve.rpc.vision_messages import asked_vision, wrong_vision
from mmserve.v1 import generation_pb2 as pb
from mmserve.v1 import model_pb2

MAX_STOP_STRINGS = 16

ROLES = {pb.ROLE_SYSTEM: "system", pb.ROLE_USER: "user", pb.ROLE_ASSISTANT: "assistant"}
REASONS = {pb.FINISH_REASON_END: "end", pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_ROLE_NUMBERS = {name: number for number, name in ROLES.items()}
_REASON_NUMBERS = {name: number for number, name in REASONS.items()}


def to_request(
    message: pb.GenerateRequest,
    *,
    request_id: str,
    info: ModelInfo,
    limits: MediaConfig,
    media: Callable[[str], bytes],
    deadline: float | None,
) -> Request:
    """The core request for the model of ``info``; ``media`` gives the bytes of a media id, or raises ``NotFound``.

    ``deadline`` is on the monotonic clock (seconds). Raises ``InvalidArgument`` with every violation, or
    ``Unimplemented`` where the model lacks what the request needs.
    """
    violations = tuple(_violations(message, info, limits))
    if violations:
        raise InvalidArgument(*violations)
    diffusion = _diffusion(message.diffusion, info)
    _require_capabilities(message, diffusion, info)
    return Request(
        id=request_id,
        model=info.name,
        messages=tuple(_message(m, media) for m in message.messages),
        sampling=_sampling(message.sampling, info),
        diffusion=diffusion,
        vision=asked_vision(message.vision),
        streaming=_streaming(message.stream),
        constraint=asked_constraint(message),
        kv_reduction=chosen_policy(message.kv_reduction, "policy"),
        image_reuse=chosen_policy(message.image_reuse, "policy"),
        deadline=deadline,
    )


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


def to_model_info(info: ModelInfo) -> model_pb2.ModelInfo:
    """The protobuf form of ``info``."""
    return model_pb2.ModelInfo(
        name=info.name,
        architecture=info.architecture,
        capabilities=model_pb2.ModelCapabilities(
            images=info.images,
            videos=info.videos,
            diffusion=info.diffusion,
            recompute_policies=info.recompute_policies,
            commit_policies=info.commit_policies,
            pruners=info.pruners,
            kv_reductions=info.kv_reductions,
            image_reuses=info.image_reuses,
        ),
        limits=model_pb2.ModelLimits(
            max_tokens=info.max_tokens,
            max_images=info.max_images,
            visual_tokens_per_image=info.visual_tokens_per_image,
            max_image_bytes=info.max_image_bytes,
            max_videos=info.max_videos,
            frames_per_video=info.frames_per_video,
            max_video_seconds=info.max_video_seconds,
            max_video_bytes=info.max_video_bytes,
        ),
        defaults=model_pb2.ModelDefaults(
            max_new_tokens=info.max_new_tokens,
            block_length=info.block_length,
            recompute_policy=info.recompute_policy,
            commit_policy=info.commit_policy,
        ),
        parameters=info.parameters,
        dtype=info.dtype,
        device=info.device,
        kernels=info.kernels,
    )


def from_model_info(message: model_pb2.ModelInfo) -> ModelInfo:
    """The core form of ``message``."""
    return ModelInfo(
        name=message.name,
        architecture=message.architecture,
        images=message.capabilities.images,
        videos=message.capabilities.videos,
        diffusion=message.capabilities.diffusion,
        recompute_policies=tuple(message.capabilities.recompute_policies),
        commit_policies=tuple(message.capabilities.commit_policies),
        pruners=tuple(message.capabilities.pruners),
        max_tokens=message.limits.max_tokens,
        max_images=message.limits.max_images,
        visual_tokens_per_image=message.limits.visual_tokens_per_image,
        max_image_bytes=message.limits.max_image_bytes,
        max_videos=message.limits.max_videos,
        frames_per_video=message.limits.frames_per_video,
        max_video_seconds=message.limits.max_video_seconds,
        max_video_bytes=message.limits.max_video_bytes,
        max_new_tokens=message.defaults.max_new_tokens,
        block_length=message.defaults.block_length,
        recompute_policy=message.defaults.recompute_policy,
        commit_policy=message.defaults.commit_policy,
        parameters=message.parameters,
        dtype=message.dtype,
        device=message.device,
        kernels=dict(message.kernels),
        kv_reductions=tuple(message.capabilities.kv_reductions),
        image_reuses=tuple(message.capabilities.image_reuses),
    )


def role_number(name: str) -> int:
    """The enum value of a role; raises ``InvalidArgument`` for any but ``system``, ``user`` and ``assistant``."""
    if name not in _ROLE_NUMBERS:
        raise InvalidArgument.of("messages.role", f"must be one of {', '.join(_ROLE_NUMBERS)}, not {name!r}")
    return _ROLE_NUMBERS[name]


def _violations(message: pb.GenerateRequest, info: ModelInfo, limits: MediaConfig) -> Iterator[FieldViolation]:
    for field, description in (
        *_wrong_messages(message, info, limits),
        *_wrong_sampling(message.sampling, info),
        *_wrong_diffusion(message.diffusion, info),
        *_wrong_answer(message, info),
        *wrong_constraint(message),
        *wrong_vision(message.vision),
        *_wrong_kv(message),
    ):
        yield FieldViolation(field, description)


Wrong = Iterator[tuple[str, str]]


def _wrong_messages(message: pb.GenerateRequest, info: ModelInfo, limits: MediaConfig) -> Wrong:
    if not message.messages:
        yield "messages", "must hold at least one message"
        return
    images = videos = 0
    for i, chat in enumerate(message.messages):
        if chat.role not in ROLES:
            yield f"messages[{i}].role", "must be ROLE_SYSTEM, ROLE_USER or ROLE_ASSISTANT"
        if not chat.parts:
            yield f"messages[{i}].parts", "must hold at least one part"
        for j, part in enumerate(chat.parts):
            path = f"messages[{i}].parts[{j}]"
            match part.WhichOneof("part"):
                case None:
                    yield path, "must be a text, an image or a video"
                case "image":
                    images += 1
                    yield from _wrong_media(part.image, f"{path}.image", limits)
                case "video":
                    videos += 1
                    yield from _wrong_media(part.video, f"{path}.video", limits)
    if message.messages[-1].role in ROLES and message.messages[-1].role != pb.ROLE_USER:
        yield f"messages[{len(message.messages) - 1}].role", "must be ROLE_USER: the last message is the user's"
    allowed = min(limits.max_images, info.max_images) if info.images else limits.max_images
    if images > allowed:
        yield "messages", f"must hold at most {allowed} images, not {images}"
    allowed = min(limits.max_videos, info.max_videos) if info.videos else limits.max_videos
    if videos > allowed:
        yield "messages", f"must hold at most {allowed} videos, not {videos}"


def _wrong_media(item: pb.Image | pb.Video, path: str, limits: MediaConfig) -> Wrong:
    match item.WhichOneof("source"):
        case None:
            yield path, "must have data or a media_id"
        case "data" if not item.data:
            yield f"{path}.data", "must not be empty"
        case "data" if len(item.data) > limits.max_item_bytes:
            yield f"{path}.data", f"must be at most {limits.max_item_bytes} bytes, not {len(item.data)}"
        case "media_id" if not is_media_id(item.media_id):
            yield f"{path}.media_id", "must be 'sha256:' and 64 lower-case hexadecimal digits"


def _wrong_sampling(sampling: pb.SamplingParams, info: ModelInfo) -> Wrong:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        yield "sampling.temperature", f"must be finite and at least 0, not {sampling.temperature}"
    if _set(sampling, "top_p") and not 0 < sampling.top_p <= 1:
        yield "sampling.top_p", f"must be in (0, 1], not {sampling.top_p}"
    if not 0 <= sampling.min_p <= 1:
        yield "sampling.min_p", f"must be in [0, 1], not {sampling.min_p}"
    if _set(sampling, "repetition_penalty") and not 0.01 <= sampling.repetition_penalty <= 100:
        yield "sampling.repetition_penalty", f"must be in [0.01, 100], not {sampling.repetition_penalty}"
    if _set(sampling, "n") and sampling.n < 1:
        yield "sampling.n", "must be at least 1"
    if _set(sampling, "max_new_tokens") and not 1 <= sampling.max_new_tokens <= info.max_tokens:
        yield "sampling.max_new_tokens", f"must be in [1, {info.max_tokens}], not {sampling.max_new_tokens}"
    if len(sampling.stop) > MAX_STOP_STRINGS:
        yield "sampling.stop", f"must hold at most {MAX_STOP_STRINGS} strings, not {len(sampling.stop)}"
    for i, stop in enumerate(sampling.stop):
        if not stop:
            yield f"sampling.stop[{i}]", "must not be empty"


def _wrong_diffusion(diffusion: pb.DiffusionParams, info: ModelInfo) -> Wrong:
    for name in ("steps", "block_length"):
        if _set(diffusion, name) and getattr(diffusion, name) < 1:
            yield f"diffusion.{name}", "must be at least 1"
    if diffusion.block_length > 1 and not info.diffusion:
        yield "diffusion.block_length", "must be 1: the model decodes one token after another"
    for kind in ("recompute", "commit"):
        yield from wrong_policy(diffusion, kind, "diffusion")


def _wrong_answer(message: pb.GenerateRequest, info: ModelInfo) -> Wrong:
    """An answer region of ``early_commit`` that is not part of the canvas, or is named twice."""
    early = message.diffusion.early_commit
    if early.answer_after and early.answer_start:
        yield "diffusion.early_commit.answer_start", "must be 0 with answer_after: the answer begins behind that text"
    if not early.answer_length:
        return
    canvas = message.sampling.max_new_tokens if _set(message.sampling, "max_new_tokens") else info.max_new_tokens
    if early.answer_start + early.answer_length > canvas:
        yield "diffusion.early_commit.answer_length", f"must end within the {canvas} tokens of the canvas"


def _wrong_kv(message: pb.GenerateRequest) -> Wrong:
    for name in ("kv_reduction", "image_reuse"):
        asked = getattr(message, name)
        if _set(message, name) and asked.WhichOneof("policy") is None:
            yield name, "must have a policy"
        yield from wrong_policy(asked, "policy", name)


def _set(message: ProtoMessage, field: str) -> bool:
    return message.HasField(field)


def _message(chat: pb.ChatMessage, media: Callable[[str], bytes]) -> Message:
    return Message(role=ROLES[chat.role], parts=tuple(_part(part, media) for part in chat.parts))


def _part(part: pb.ContentPart, media: Callable[[str], bytes]) -> Part:
    match part.WhichOneof("part"):
        case "image":
            return ImagePart(_bytes(part.image, media))
        case "video":
            return VideoPart(_bytes(part.video, media))
    return TextPart(part.text)


def _bytes(item: pb.Image | pb.Video, media: Callable[[str], bytes]) -> bytes:
    return item.data if item.WhichOneof("source") == "data" else media(item.media_id)


def _sampling(sampling: pb.SamplingParams, info: ModelInfo) -> Sampling:
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p if _set(sampling, "top_p") else 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty if _set(sampling, "repetition_penalty") else 1.0,
        seed=sampling.seed,
        max_new_tokens=sampling.max_new_tokens if _set(sampling, "max_new_tokens") else info.max_new_tokens,
        stop=tuple(sampling.stop),
        n=sampling.n if _set(sampling, "n") else 1,
    )


def _diffusion(diffusion: pb.DiffusionParams, info: ModelInfo) -> Diffusion:
    return Diffusion(
        steps=diffusion.steps,
        block_length=diffusion.block_length,
        recompute=chosen_policy(diffusion, "recompute") or Policy(name=info.recompute_policy),
        commit=chosen_policy(diffusion, "commit") or Policy(name=info.commit_policy),
    )


def _streaming(stream: pb.StreamOptions) -> Streaming:
    deltas = stream.deltas if _set(stream, "deltas") else True
    return Streaming(deltas=deltas, snapshots=stream.snapshots, tokens=stream.tokens)


def _require_capabilities(message: pb.GenerateRequest, diffusion: Diffusion, info: ModelInfo) -> None:
    for kind, taken in (("image", info.images), ("video", info.videos)):
        if not taken and any(_set(part, kind) for chat in message.messages for part in chat.parts):
            raise Unimplemented(f"model {info.name!r} takes no {kind}s")
    for kind, policy, known in (
        ("recompute", diffusion.recompute, info.recompute_policies),
        ("commit", diffusion.commit, info.commit_policies),
    ):
        if policy.name not in known:
            raise Unimplemented(lacking(info.name, kind, policy.name, known, diffusion=info.diffusion))


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
        log_weight=message.log_weight if _set(message, "log_weight") else None,
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
