from mmserve.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadModelRequest(_message.Message):
    __slots__ = ("path", "name", "dtype")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    path: str
    name: str
    dtype: str
    def __init__(self, path: _Optional[str] = ..., name: _Optional[str] = ..., dtype: _Optional[str] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: ModelInfo
    def __init__(self, model: _Optional[_Union[ModelInfo, _Mapping]] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("model", "drain_seconds")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    drain_seconds: float
    def __init__(self, model: _Optional[str] = ..., drain_seconds: _Optional[float] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ("ended",)
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ended: bool
    def __init__(self, ended: bool = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("model", "adapter")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    model: str
    adapter: str
    def __init__(self, model: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: AdapterInfo
    def __init__(self, adapter: _Optional[_Union[AdapterInfo, _Mapping]] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ...) -> None: ...

class DropAdapterRequest(_message.Message):
    __slots__ = ("model", "adapter")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    model: str
    adapter: str
    def __init__(self, model: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class DropAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("name", "digest", "rank", "bytes", "block_length")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LENGTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    rank: int
    bytes: int
    block_length: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., bytes: _Optional[int] = ..., block_length: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...

class DescribeModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class DescribeModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: ModelInfo
    def __init__(self, model: _Optional[_Union[ModelInfo, _Mapping]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "architecture", "capabilities", "limits", "defaults", "parameters", "dtype", "device", "kernels", "stored")
    class KernelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    capabilities: ModelCapabilities
    limits: ModelLimits
    defaults: ModelDefaults
    parameters: int
    dtype: str
    device: str
    kernels: _containers.ScalarMap[str, str]
    stored: str
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., capabilities: _Optional[_Union[ModelCapabilities, _Mapping]] = ..., limits: _Optional[_Union[ModelLimits, _Mapping]] = ..., defaults: _Optional[_Union[ModelDefaults, _Mapping]] = ..., parameters: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., kernels: _Optional[_Mapping[str, str]] = ..., stored: _Optional[str] = ...) -> None: ...

class ModelCapabilities(_message.Message):
    __slots__ = ("images", "diffusion", "recompute_policies", "commit_policies", "videos", "pruners", "kv_reductions", "image_reuses", "sessions", "tool_format", "decisions")
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    DIFFUSION_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_POLICIES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_POLICIES_FIELD_NUMBER: _ClassVar[int]
    VIDEOS_FIELD_NUMBER: _ClassVar[int]
    PRUNERS_FIELD_NUMBER: _ClassVar[int]
    KV_REDUCTIONS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_REUSES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TOOL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    images: bool
    diffusion: bool
    recompute_policies: _containers.RepeatedScalarFieldContainer[str]
    commit_policies: _containers.RepeatedScalarFieldContainer[str]
    videos: bool
    pruners: _containers.RepeatedScalarFieldContainer[str]
    kv_reductions: _containers.RepeatedScalarFieldContainer[str]
    image_reuses: _containers.RepeatedScalarFieldContainer[str]
    sessions: bool
    tool_format: str
    decisions: str
    def __init__(self, images: bool = ..., diffusion: bool = ..., recompute_policies: _Optional[_Iterable[str]] = ..., commit_policies: _Optional[_Iterable[str]] = ..., videos: bool = ..., pruners: _Optional[_Iterable[str]] = ..., kv_reductions: _Optional[_Iterable[str]] = ..., image_reuses: _Optional[_Iterable[str]] = ..., sessions: bool = ..., tool_format: _Optional[str] = ..., decisions: _Optional[str] = ...) -> None: ...

class ModelLimits(_message.Message):
    __slots__ = ("max_tokens", "max_images", "visual_tokens_per_image", "max_image_bytes", "max_videos", "frames_per_video", "max_video_seconds", "max_video_bytes")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGES_FIELD_NUMBER: _ClassVar[int]
    VISUAL_TOKENS_PER_IMAGE_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_VIDEOS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_PER_VIDEO_FIELD_NUMBER: _ClassVar[int]
    MAX_VIDEO_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_VIDEO_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    max_images: int
    visual_tokens_per_image: int
    max_image_bytes: int
    max_videos: int
    frames_per_video: int
    max_video_seconds: float
    max_video_bytes: int
    def __init__(self, max_tokens: _Optional[int] = ..., max_images: _Optional[int] = ..., visual_tokens_per_image: _Optional[int] = ..., max_image_bytes: _Optional[int] = ..., max_videos: _Optional[int] = ..., frames_per_video: _Optional[int] = ..., max_video_seconds: _Optional[float] = ..., max_video_bytes: _Optional[int] = ...) -> None: ...

class ModelDefaults(_message.Message):
    __slots__ = ("max_new_tokens", "block_length", "recompute_policy", "commit_policy", "policy_source", "balanced", "exact", "fast", "curve", "measured_json")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LENGTH_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_POLICY_FIELD_NUMBER: _ClassVar[int]
    COMMIT_POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    BALANCED_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    FAST_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    MEASURED_JSON_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    block_length: int
    recompute_policy: str
    commit_policy: str
    policy_source: str
    balanced: _generation_pb2.DiffusionParams
    exact: _generation_pb2.DiffusionParams
    fast: _generation_pb2.DiffusionParams
    curve: _containers.RepeatedCompositeFieldContainer[MeasuredPolicies]
    measured_json: str
    def __init__(self, max_new_tokens: _Optional[int] = ..., block_length: _Optional[int] = ..., recompute_policy: _Optional[str] = ..., commit_policy: _Optional[str] = ..., policy_source: _Optional[str] = ..., balanced: _Optional[_Union[_generation_pb2.DiffusionParams, _Mapping]] = ..., exact: _Optional[_Union[_generation_pb2.DiffusionParams, _Mapping]] = ..., fast: _Optional[_Union[_generation_pb2.DiffusionParams, _Mapping]] = ..., curve: _Optional[_Iterable[_Union[MeasuredPolicies, _Mapping]]] = ..., measured_json: _Optional[str] = ...) -> None: ...

class MeasuredPolicies(_message.Message):
    __slots__ = ("policies", "quality", "accuracy", "agreement", "same", "time_ratio", "forwards")
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    SAME_FIELD_NUMBER: _ClassVar[int]
    TIME_RATIO_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    policies: _generation_pb2.DiffusionParams
    quality: float
    accuracy: float
    agreement: float
    same: float
    time_ratio: float
    forwards: float
    def __init__(self, policies: _Optional[_Union[_generation_pb2.DiffusionParams, _Mapping]] = ..., quality: _Optional[float] = ..., accuracy: _Optional[float] = ..., agreement: _Optional[float] = ..., same: _Optional[float] = ..., time_ratio: _Optional[float] = ..., forwards: _Optional[float] = ...) -> None: ...
