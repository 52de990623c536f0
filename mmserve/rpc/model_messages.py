"""What is told of a model, as messages carry it, there and back."""

from __future__ import annotations

import json

from mmserve.core.info import ModelInfo
from mmserve.core.tuning import FAST, Measured, Pair, Tuning
from mmserve.rpc.policy_messages import chosen_pair, put_pair
from mmserve.v1 import model_pb2

#: Figures of a measured pair, but for its accuracy, which it may not have.
_FIGURES = ("quality", "agreement", "same", "time_ratio", "forwards")


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
            sessions=info.sessions,
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
        defaults=_defaults(info),
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
        sessions=message.capabilities.sessions,
        tuning=_tuning(message.defaults),
    )


def _defaults(info: ModelInfo) -> model_pb2.ModelDefaults:
    message = model_pb2.ModelDefaults(
        max_new_tokens=info.max_new_tokens,
        block_length=info.block_length,
        recompute_policy=info.recompute_policy,
        commit_policy=info.commit_policy,
    )
    if (tuning := info.tuning) is None:
        return message
    message.policy_source = tuning.source
    put_pair(message.exact, tuning.plain)
    put_pair(message.balanced, tuning.default)
    put_pair(message.fast, tuning.pair(FAST))
    for row in tuning.curve:
        added = message.curve.add(accuracy=row.accuracy, **{name: getattr(row, name) for name in _FIGURES})
        put_pair(added.policies, row.pair)
    message.measured_json = json.dumps(tuning.measured) if tuning.measured else ""
    return message


def _tuning(message: model_pb2.ModelDefaults) -> Tuning | None:
    plain, default = chosen_pair(message.exact), chosen_pair(message.balanced)
    if plain is None or default is None:
        return None  # of a server that does not say, or of one that has policies unknown here
    curve = [(chosen_pair(row.policies), row) for row in message.curve]
    return Tuning(
        source=message.policy_source,
        plain=plain,
        default=default,
        curve=tuple(_measured(pair, row) for pair, row in curve if pair is not None),
        measured=json.loads(message.measured_json or "{}"),
    )


def _measured(pair: Pair, row: model_pb2.MeasuredPolicies) -> Measured:
    accuracy = row.accuracy if row.HasField("accuracy") else None
    return Measured(pair=pair, accuracy=accuracy, **{name: getattr(row, name) for name in _FIGURES})
