"""What is told of a model, as messages carry it, there and back."""

from __future__ import annotations

from mmserve.core.info import ModelInfo
from mmserve.v1 import model_pb2


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
