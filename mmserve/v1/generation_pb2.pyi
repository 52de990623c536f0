from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolChoice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CHOICE_UNSPECIFIED: _ClassVar[ToolChoice]
    TOOL_CHOICE_AUTO: _ClassVar[ToolChoice]
    TOOL_CHOICE_NONE: _ClassVar[ToolChoice]
    TOOL_CHOICE_REQUIRED: _ClassVar[ToolChoice]

class SchemaOption(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEMA_OPTION_UNSPECIFIED: _ClassVar[SchemaOption]
    SCHEMA_OPTION_UNKNOWN_FORMATS: _ClassVar[SchemaOption]
    SCHEMA_OPTION_ONE_OF_AS_ANY_OF: _ClassVar[SchemaOption]
    SCHEMA_OPTION_CLOSED_OBJECTS: _ClassVar[SchemaOption]
    SCHEMA_OPTION_WHITE_SPACE: _ClassVar[SchemaOption]
    SCHEMA_OPTION_EXPONENTS: _ClassVar[SchemaOption]
    SCHEMA_OPTION_ANY_ORDER: _ClassVar[SchemaOption]

class ConstraintMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONSTRAINT_MODE_UNSPECIFIED: _ClassVar[ConstraintMode]
    CONSTRAINT_MODE_STRICT: _ClassVar[ConstraintMode]
    CONSTRAINT_MODE_VALIDATE: _ClassVar[ConstraintMode]
    CONSTRAINT_MODE_LENIENT: _ClassVar[ConstraintMode]

class ConstraintSampling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONSTRAINT_SAMPLING_UNSPECIFIED: _ClassVar[ConstraintSampling]
    CONSTRAINT_SAMPLING_MASK: _ClassVar[ConstraintSampling]
    CONSTRAINT_SAMPLING_AWRS: _ClassVar[ConstraintSampling]
    CONSTRAINT_SAMPLING_ASAP: _ClassVar[ConstraintSampling]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SYSTEM: _ClassVar[Role]
    ROLE_USER: _ClassVar[Role]
    ROLE_ASSISTANT: _ClassVar[Role]
    ROLE_TOOL: _ClassVar[Role]

class Quality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUALITY_UNSPECIFIED: _ClassVar[Quality]
    QUALITY_EXACT: _ClassVar[Quality]
    QUALITY_BALANCED: _ClassVar[Quality]
    QUALITY_FAST: _ClassVar[Quality]

class DraftState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_STATE_UNSPECIFIED: _ClassVar[DraftState]
    DRAFT_STATE_MASKED: _ClassVar[DraftState]
    DRAFT_STATE_DRAFT: _ClassVar[DraftState]
    DRAFT_STATE_COMMITTED: _ClassVar[DraftState]
    DRAFT_STATE_EDITED: _ClassVar[DraftState]
    DRAFT_STATE_PINNED: _ClassVar[DraftState]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_END: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
TOOL_CHOICE_UNSPECIFIED: ToolChoice
TOOL_CHOICE_AUTO: ToolChoice
TOOL_CHOICE_NONE: ToolChoice
TOOL_CHOICE_REQUIRED: ToolChoice
SCHEMA_OPTION_UNSPECIFIED: SchemaOption
SCHEMA_OPTION_UNKNOWN_FORMATS: SchemaOption
SCHEMA_OPTION_ONE_OF_AS_ANY_OF: SchemaOption
SCHEMA_OPTION_CLOSED_OBJECTS: SchemaOption
SCHEMA_OPTION_WHITE_SPACE: SchemaOption
SCHEMA_OPTION_EXPONENTS: SchemaOption
SCHEMA_OPTION_ANY_ORDER: SchemaOption
CONSTRAINT_MODE_UNSPECIFIED: ConstraintMode
CONSTRAINT_MODE_STRICT: ConstraintMode
CONSTRAINT_MODE_VALIDATE: ConstraintMode
CONSTRAINT_MODE_LENIENT: ConstraintMode
CONSTRAINT_SAMPLING_UNSPECIFIED: ConstraintSampling
CONSTRAINT_SAMPLING_MASK: ConstraintSampling
CONSTRAINT_SAMPLING_AWRS: ConstraintSampling
CONSTRAINT_SAMPLING_ASAP: ConstraintSampling
ROLE_UNSPECIFIED: Role
ROLE_SYSTEM: Role
ROLE_USER: Role
ROLE_ASSISTANT: Role
ROLE_TOOL: Role
QUALITY_UNSPECIFIED: Quality
QUALITY_EXACT: Quality
QUALITY_BALANCED: Quality
QUALITY_FAST: Quality
DRAFT_STATE_UNSPECIFIED: DraftState
DRAFT_STATE_MASKED: DraftState
DRAFT_STATE_DRAFT: DraftState
DRAFT_STATE_COMMITTED: DraftState
DRAFT_STATE_EDITED: DraftState
DRAFT_STATE_PINNED: DraftState
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_END: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("model", "messages", "sampling", "diffusion", "stream", "constraint", "vision", "kv_reduction", "image_reuse", "tools", "tool_choice", "required_tool", "parallel_tool_calls", "raw", "slo_class", "adapter", "template_options", "allowed_tools", "continue_final_message")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DIFFUSION_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    VISION_FIELD_NUMBER: _ClassVar[int]
    KV_REDUCTION_FIELD_NUMBER: _ClassVar[int]
    IMAGE_REUSE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_TOOL_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOOLS_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    sampling: SamplingParams
    diffusion: DiffusionParams
    stream: StreamOptions
    constraint: Constraint
    vision: VisionParams
    kv_reduction: KvReduction
    image_reuse: ImageReuse
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    required_tool: str
    parallel_tool_calls: bool
    raw: bool
    slo_class: str
    adapter: str
    template_options: str
    allowed_tools: _containers.RepeatedScalarFieldContainer[str]
    continue_final_message: bool
    def __init__(self, model: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., diffusion: _Optional[_Union[DiffusionParams, _Mapping]] = ..., stream: _Optional[_Union[StreamOptions, _Mapping]] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., vision: _Optional[_Union[VisionParams, _Mapping]] = ..., kv_reduction: _Optional[_Union[KvReduction, _Mapping]] = ..., image_reuse: _Optional[_Union[ImageReuse, _Mapping]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[_Union[ToolChoice, str]] = ..., required_tool: _Optional[str] = ..., parallel_tool_calls: bool = ..., raw: bool = ..., slo_class: _Optional[str] = ..., adapter: _Optional[str] = ..., template_options: _Optional[str] = ..., allowed_tools: _Optional[_Iterable[str]] = ..., continue_final_message: bool = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters_json_schema", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_json_schema: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_json_schema: _Optional[str] = ..., strict: bool = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "regex", "choice", "lark", "gbnf", "template", "mode", "sampling", "schema_options")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    GBNF_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    choice: Choice
    lark: str
    gbnf: str
    template: Template
    mode: ConstraintMode
    sampling: ConstraintSampling
    schema_options: _containers.RepeatedScalarFieldContainer[SchemaOption]
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., lark: _Optional[str] = ..., gbnf: _Optional[str] = ..., template: _Optional[_Union[Template, _Mapping]] = ..., mode: _Optional[_Union[ConstraintMode, str]] = ..., sampling: _Optional[_Union[ConstraintSampling, str]] = ..., schema_options: _Optional[_Iterable[_Union[SchemaOption, str]]] = ...) -> None: ...

class Template(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[TemplatePart]
    def __init__(self, parts: _Optional[_Iterable[_Union[TemplatePart, _Mapping]]] = ...) -> None: ...

class TemplatePart(_message.Message):
    __slots__ = ("text", "hole")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    HOLE_FIELD_NUMBER: _ClassVar[int]
    text: str
    hole: Hole
    def __init__(self, text: _Optional[str] = ..., hole: _Optional[_Union[Hole, _Mapping]] = ...) -> None: ...

class Hole(_message.Message):
    __slots__ = ("constraint", "max_tokens")
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    constraint: Constraint
    max_tokens: int
    def __init__(self, constraint: _Optional[_Union[Constraint, _Mapping]] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("options",)
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, options: _Optional[_Iterable[str]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "parts", "tool_calls", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: Role
    parts: _containers.RepeatedCompositeFieldContainer[ContentPart]
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., parts: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text", "image", "video", "tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    image: Image
    video: Video
    tokens: TokenIds
    def __init__(self, text: _Optional[str] = ..., image: _Optional[_Union[Image, _Mapping]] = ..., video: _Optional[_Union[Video, _Mapping]] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("data", "media_id", "url")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MEDIA_ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    media_id: str
    url: str
    def __init__(self, data: _Optional[bytes] = ..., media_id: _Optional[str] = ..., url: _Optional[str] = ...) -> None: ...

class Video(_message.Message):
    __slots__ = ("data", "media_id", "url", "sampling")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MEDIA_ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    media_id: str
    url: str
    sampling: VideoSampling
    def __init__(self, data: _Optional[bytes] = ..., media_id: _Optional[str] = ..., url: _Optional[str] = ..., sampling: _Optional[_Union[VideoSampling, _Mapping]] = ...) -> None: ...

class VideoSampling(_message.Message):
    __slots__ = ("fps", "frames", "scene_similarity", "scene_frames", "detail_every")
    FPS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    SCENE_SIMILARITY_FIELD_NUMBER: _ClassVar[int]
    SCENE_FRAMES_FIELD_NUMBER: _ClassVar[int]
    DETAIL_EVERY_FIELD_NUMBER: _ClassVar[int]
    fps: float
    frames: int
    scene_similarity: float
    scene_frames: int
    detail_every: int
    def __init__(self, fps: _Optional[float] = ..., frames: _Optional[int] = ..., scene_similarity: _Optional[float] = ..., scene_frames: _Optional[int] = ..., detail_every: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "max_new_tokens", "stop", "min_p", "repetition_penalty", "n", "frequency_penalty", "presence_penalty", "logit_bias", "ignore_end")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_END_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    min_p: float
    repetition_penalty: float
    n: int
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    ignore_end: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., n: _Optional[int] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., ignore_end: bool = ...) -> None: ...

class DiffusionParams(_message.Message):
    __slots__ = ("steps", "block_length", "no_cache", "dkv_decode", "last", "prefix", "dual", "dkv_greedy", "free_cache", "adaptive", "block", "low_confidence", "threshold", "random", "factor", "confident", "entropy_bound", "early_commit", "ngram", "edit", "learned", "guided", "draft_model", "scheduler", "quality", "min_quality", "cfg_scale", "max_steps", "seed_canvas")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NO_CACHE_FIELD_NUMBER: _ClassVar[int]
    DKV_DECODE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    DUAL_FIELD_NUMBER: _ClassVar[int]
    DKV_GREEDY_FIELD_NUMBER: _ClassVar[int]
    FREE_CACHE_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    LOW_CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    RANDOM_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    CONFIDENT_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_BOUND_FIELD_NUMBER: _ClassVar[int]
    EARLY_COMMIT_FIELD_NUMBER: _ClassVar[int]
    NGRAM_FIELD_NUMBER: _ClassVar[int]
    EDIT_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    GUIDED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    MIN_QUALITY_FIELD_NUMBER: _ClassVar[int]
    CFG_SCALE_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    SEED_CANVAS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    block_length: int
    no_cache: NoCache
    dkv_decode: DkvDecode
    last: Last
    prefix: Prefix
    dual: Dual
    dkv_greedy: DkvGreedy
    free_cache: FreeCache
    adaptive: Adaptive
    block: Block
    low_confidence: LowConfidence
    threshold: Threshold
    random: Random
    factor: Factor
    confident: Confident
    entropy_bound: EntropyBound
    early_commit: EarlyCommit
    ngram: Ngram
    edit: Edit
    learned: Learned
    guided: Guided
    draft_model: DraftModel
    scheduler: Scheduled
    quality: Quality
    min_quality: float
    cfg_scale: float
    max_steps: int
    seed_canvas: SeedCanvas
    def __init__(self, steps: _Optional[int] = ..., block_length: _Optional[int] = ..., no_cache: _Optional[_Union[NoCache, _Mapping]] = ..., dkv_decode: _Optional[_Union[DkvDecode, _Mapping]] = ..., last: _Optional[_Union[Last, _Mapping]] = ..., prefix: _Optional[_Union[Prefix, _Mapping]] = ..., dual: _Optional[_Union[Dual, _Mapping]] = ..., dkv_greedy: _Optional[_Union[DkvGreedy, _Mapping]] = ..., free_cache: _Optional[_Union[FreeCache, _Mapping]] = ..., adaptive: _Optional[_Union[Adaptive, _Mapping]] = ..., block: _Optional[_Union[Block, _Mapping]] = ..., low_confidence: _Optional[_Union[LowConfidence, _Mapping]] = ..., threshold: _Optional[_Union[Threshold, _Mapping]] = ..., random: _Optional[_Union[Random, _Mapping]] = ..., factor: _Optional[_Union[Factor, _Mapping]] = ..., confident: _Optional[_Union[Confident, _Mapping]] = ..., entropy_bound: _Optional[_Union[EntropyBound, _Mapping]] = ..., early_commit: _Optional[_Union[EarlyCommit, _Mapping]] = ..., ngram: _Optional[_Union[Ngram, _Mapping]] = ..., edit: _Optional[_Union[Edit, _Mapping]] = ..., learned: _Optional[_Union[Learned, _Mapping]] = ..., guided: _Optional[_Union[Guided, _Mapping]] = ..., draft_model: _Optional[_Union[DraftModel, _Mapping]] = ..., scheduler: _Optional[_Union[Scheduled, _Mapping]] = ..., quality: _Optional[_Union[Quality, str]] = ..., min_quality: _Optional[float] = ..., cfg_scale: _Optional[float] = ..., max_steps: _Optional[int] = ..., seed_canvas: _Optional[_Union[SeedCanvas, _Mapping]] = ...) -> None: ...

class SeedCanvas(_message.Message):
    __slots__ = ("tokens", "pinned")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    pinned: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., pinned: _Optional[_Iterable[int]] = ...) -> None: ...

class NoCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DkvDecode(_message.Message):
    __slots__ = ("refresh",)
    REFRESH_FIELD_NUMBER: _ClassVar[int]
    refresh: int
    def __init__(self, refresh: _Optional[int] = ...) -> None: ...

class Prefix(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Dual(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DkvGreedy(_message.Message):
    __slots__ = ("refresh", "window")
    REFRESH_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    refresh: int
    window: int
    def __init__(self, refresh: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...

class FreeCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Adaptive(_message.Message):
    __slots__ = ("prompt_refresh", "response_refresh", "ratio")
    PROMPT_REFRESH_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_REFRESH_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    prompt_refresh: int
    response_refresh: int
    ratio: float
    def __init__(self, prompt_refresh: _Optional[int] = ..., response_refresh: _Optional[int] = ..., ratio: _Optional[float] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Last(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LowConfidence(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Threshold(_message.Message):
    __slots__ = ("confidence",)
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    confidence: float
    def __init__(self, confidence: _Optional[float] = ...) -> None: ...

class Random(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Factor(_message.Message):
    __slots__ = ("factor",)
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    factor: float
    def __init__(self, factor: _Optional[float] = ...) -> None: ...

class Confident(_message.Message):
    __slots__ = ("confidence",)
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    confidence: float
    def __init__(self, confidence: _Optional[float] = ...) -> None: ...

class EntropyBound(_message.Message):
    __slots__ = ("bound",)
    BOUND_FIELD_NUMBER: _ClassVar[int]
    bound: float
    def __init__(self, bound: _Optional[float] = ...) -> None: ...

class Learned(_message.Message):
    __slots__ = ("threshold", "end_of_text")
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    END_OF_TEXT_FIELD_NUMBER: _ClassVar[int]
    threshold: float
    end_of_text: bool
    def __init__(self, threshold: _Optional[float] = ..., end_of_text: bool = ...) -> None: ...

class EarlyCommit(_message.Message):
    __slots__ = ("early", "middle", "late", "answer_start", "answer_length", "low_confidence", "threshold", "random", "factor", "confident", "entropy_bound", "learned", "answer_after", "mistakes")
    EARLY_FIELD_NUMBER: _ClassVar[int]
    MIDDLE_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_START_FIELD_NUMBER: _ClassVar[int]
    ANSWER_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LOW_CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    RANDOM_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    CONFIDENT_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_BOUND_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    ANSWER_AFTER_FIELD_NUMBER: _ClassVar[int]
    MISTAKES_FIELD_NUMBER: _ClassVar[int]
    early: float
    middle: float
    late: float
    answer_start: int
    answer_length: int
    low_confidence: LowConfidence
    threshold: Threshold
    random: Random
    factor: Factor
    confident: Confident
    entropy_bound: EntropyBound
    learned: Learned
    answer_after: str
    mistakes: float
    def __init__(self, early: _Optional[float] = ..., middle: _Optional[float] = ..., late: _Optional[float] = ..., answer_start: _Optional[int] = ..., answer_length: _Optional[int] = ..., low_confidence: _Optional[_Union[LowConfidence, _Mapping]] = ..., threshold: _Optional[_Union[Threshold, _Mapping]] = ..., random: _Optional[_Union[Random, _Mapping]] = ..., factor: _Optional[_Union[Factor, _Mapping]] = ..., confident: _Optional[_Union[Confident, _Mapping]] = ..., entropy_bound: _Optional[_Union[EntropyBound, _Mapping]] = ..., learned: _Optional[_Union[Learned, _Mapping]] = ..., answer_after: _Optional[str] = ..., mistakes: _Optional[float] = ...) -> None: ...

class Edit(_message.Message):
    __slots__ = ("confidence", "edit_confidence", "passes")
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    EDIT_CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    confidence: float
    edit_confidence: float
    passes: int
    def __init__(self, confidence: _Optional[float] = ..., edit_confidence: _Optional[float] = ..., passes: _Optional[int] = ...) -> None: ...

class Scheduled(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Ngram(_message.Message):
    __slots__ = ("length", "longest", "shortest")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    LONGEST_FIELD_NUMBER: _ClassVar[int]
    SHORTEST_FIELD_NUMBER: _ClassVar[int]
    length: int
    longest: int
    shortest: int
    def __init__(self, length: _Optional[int] = ..., longest: _Optional[int] = ..., shortest: _Optional[int] = ...) -> None: ...

class Guided(_message.Message):
    __slots__ = ("top_k", "ratio")
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    top_k: int
    ratio: float
    def __init__(self, top_k: _Optional[int] = ..., ratio: _Optional[float] = ...) -> None: ...

class DraftModel(_message.Message):
    __slots__ = ("length",)
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    length: int
    def __init__(self, length: _Optional[int] = ...) -> None: ...

class VisionParams(_message.Message):
    __slots__ = ("none", "random", "resize", "cls_attention", "hired", "visionzip", "mustdrop", "tome", "column_attention", "fastv", "redvtp", "keep_ratio", "token_budget", "attention_mass", "min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels")
    NONE_FIELD_NUMBER: _ClassVar[int]
    RANDOM_FIELD_NUMBER: _ClassVar[int]
    RESIZE_FIELD_NUMBER: _ClassVar[int]
    CLS_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    HIRED_FIELD_NUMBER: _ClassVar[int]
    VISIONZIP_FIELD_NUMBER: _ClassVar[int]
    MUSTDROP_FIELD_NUMBER: _ClassVar[int]
    TOME_FIELD_NUMBER: _ClassVar[int]
    COLUMN_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    FASTV_FIELD_NUMBER: _ClassVar[int]
    REDVTP_FIELD_NUMBER: _ClassVar[int]
    KEEP_RATIO_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_MASS_FIELD_NUMBER: _ClassVar[int]
    MIN_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_MIN_PIXELS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    none: Unpruned
    random: RandomPruner
    resize: Resize
    cls_attention: ClsAttention
    hired: Hired
    visionzip: VisionZip
    mustdrop: MustDrop
    tome: ToMe
    column_attention: ColumnAttention
    fastv: FastV
    redvtp: RedVtp
    keep_ratio: float
    token_budget: int
    attention_mass: float
    min_pixels: int
    max_pixels: int
    video_min_pixels: int
    video_max_pixels: int
    def __init__(self, none: _Optional[_Union[Unpruned, _Mapping]] = ..., random: _Optional[_Union[RandomPruner, _Mapping]] = ..., resize: _Optional[_Union[Resize, _Mapping]] = ..., cls_attention: _Optional[_Union[ClsAttention, _Mapping]] = ..., hired: _Optional[_Union[Hired, _Mapping]] = ..., visionzip: _Optional[_Union[VisionZip, _Mapping]] = ..., mustdrop: _Optional[_Union[MustDrop, _Mapping]] = ..., tome: _Optional[_Union[ToMe, _Mapping]] = ..., column_attention: _Optional[_Union[ColumnAttention, _Mapping]] = ..., fastv: _Optional[_Union[FastV, _Mapping]] = ..., redvtp: _Optional[_Union[RedVtp, _Mapping]] = ..., keep_ratio: _Optional[float] = ..., token_budget: _Optional[int] = ..., attention_mass: _Optional[float] = ..., min_pixels: _Optional[int] = ..., max_pixels: _Optional[int] = ..., video_min_pixels: _Optional[int] = ..., video_max_pixels: _Optional[int] = ...) -> None: ...

class Unpruned(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RandomPruner(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Resize(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClsAttention(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Hired(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VisionZip(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MustDrop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ToMe(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ColumnAttention(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FastV(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RedVtp(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvReduction(_message.Message):
    __slots__ = ("heavy_hitters", "expected_attention", "sink_window", "visual_cache")
    HEAVY_HITTERS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    SINK_WINDOW_FIELD_NUMBER: _ClassVar[int]
    VISUAL_CACHE_FIELD_NUMBER: _ClassVar[int]
    heavy_hitters: HeavyHitters
    expected_attention: ExpectedAttention
    sink_window: SinkWindow
    visual_cache: VisualCache
    def __init__(self, heavy_hitters: _Optional[_Union[HeavyHitters, _Mapping]] = ..., expected_attention: _Optional[_Union[ExpectedAttention, _Mapping]] = ..., sink_window: _Optional[_Union[SinkWindow, _Mapping]] = ..., visual_cache: _Optional[_Union[VisualCache, _Mapping]] = ...) -> None: ...

class HeavyHitters(_message.Message):
    __slots__ = ("budget", "recent")
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    budget: int
    recent: float
    def __init__(self, budget: _Optional[int] = ..., recent: _Optional[float] = ...) -> None: ...

class ExpectedAttention(_message.Message):
    __slots__ = ("budget", "sinks", "future")
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    FUTURE_FIELD_NUMBER: _ClassVar[int]
    budget: int
    sinks: int
    future: int
    def __init__(self, budget: _Optional[int] = ..., sinks: _Optional[int] = ..., future: _Optional[int] = ...) -> None: ...

class SinkWindow(_message.Message):
    __slots__ = ("budget", "sinks")
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    budget: int
    sinks: int
    def __init__(self, budget: _Optional[int] = ..., sinks: _Optional[int] = ...) -> None: ...

class VisualCache(_message.Message):
    __slots__ = ("budget", "outputs")
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    budget: int
    outputs: int
    def __init__(self, budget: _Optional[int] = ..., outputs: _Optional[int] = ...) -> None: ...

class ImageReuse(_message.Message):
    __slots__ = ("blend", "lego_link", "random_reuse", "kv_share")
    BLEND_FIELD_NUMBER: _ClassVar[int]
    LEGO_LINK_FIELD_NUMBER: _ClassVar[int]
    RANDOM_REUSE_FIELD_NUMBER: _ClassVar[int]
    KV_SHARE_FIELD_NUMBER: _ClassVar[int]
    blend: Blend
    lego_link: LegoLink
    random_reuse: RandomReuse
    kv_share: KvShare
    def __init__(self, blend: _Optional[_Union[Blend, _Mapping]] = ..., lego_link: _Optional[_Union[LegoLink, _Mapping]] = ..., random_reuse: _Optional[_Union[RandomReuse, _Mapping]] = ..., kv_share: _Optional[_Union[KvShare, _Mapping]] = ...) -> None: ...

class Blend(_message.Message):
    __slots__ = ("recompute", "layers")
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    recompute: float
    layers: int
    def __init__(self, recompute: _Optional[float] = ..., layers: _Optional[int] = ...) -> None: ...

class LegoLink(_message.Message):
    __slots__ = ("recompute",)
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    recompute: float
    def __init__(self, recompute: _Optional[float] = ...) -> None: ...

class RandomReuse(_message.Message):
    __slots__ = ("recompute",)
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    recompute: float
    def __init__(self, recompute: _Optional[float] = ...) -> None: ...

class KvShare(_message.Message):
    __slots__ = ("recompute", "layers", "each_step")
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    EACH_STEP_FIELD_NUMBER: _ClassVar[int]
    recompute: float
    layers: int
    each_step: int
    def __init__(self, recompute: _Optional[float] = ..., layers: _Optional[int] = ..., each_step: _Optional[int] = ...) -> None: ...

class StreamOptions(_message.Message):
    __slots__ = ("deltas", "snapshots", "tokens", "drafts", "alternatives", "prefilled", "prompt", "prompt_tokens", "prompt_alternatives")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    deltas: bool
    snapshots: bool
    tokens: bool
    drafts: bool
    alternatives: int
    prefilled: bool
    prompt: bool
    prompt_tokens: bool
    prompt_alternatives: int
    def __init__(self, deltas: bool = ..., snapshots: bool = ..., tokens: bool = ..., drafts: bool = ..., alternatives: _Optional[int] = ..., prefilled: bool = ..., prompt: bool = ..., prompt_tokens: bool = ..., prompt_alternatives: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("admitted", "snapshot", "delta", "finished", "tool_call_delta", "draft", "prefilled", "sample")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_DELTA_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    admitted: Admitted
    snapshot: Snapshot
    delta: Delta
    finished: Finished
    tool_call_delta: ToolCallDelta
    draft: Draft
    prefilled: Prefilled
    sample: int
    def __init__(self, admitted: _Optional[_Union[Admitted, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., tool_call_delta: _Optional[_Union[ToolCallDelta, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., sample: _Optional[int] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("request_id", "queued_ahead")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUED_AHEAD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    queued_ahead: int
    def __init__(self, request_id: _Optional[str] = ..., queued_ahead: _Optional[int] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("usage", "prompt_ids", "prompt_text", "prompt_tokens")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    usage: Usage
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_text: str
    prompt_tokens: _containers.RepeatedCompositeFieldContainer[PromptToken]
    def __init__(self, usage: _Optional[_Union[Usage, _Mapping]] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., prompt_text: _Optional[str] = ..., prompt_tokens: _Optional[_Iterable[_Union[PromptToken, _Mapping]]] = ...) -> None: ...

class PromptToken(_message.Message):
    __slots__ = ("id", "text", "log_probability", "rank", "alternatives", "text_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    log_probability: float
    rank: int
    alternatives: _containers.RepeatedCompositeFieldContainer[Alternative]
    text_bytes: bytes
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., log_probability: _Optional[float] = ..., rank: _Optional[int] = ..., alternatives: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ..., text_bytes: _Optional[bytes] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("text", "committed", "total", "forwards", "edited")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    EDITED_FIELD_NUMBER: _ClassVar[int]
    text: str
    committed: int
    total: int
    forwards: int
    edited: int
    def __init__(self, text: _Optional[str] = ..., committed: _Optional[int] = ..., total: _Optional[int] = ..., forwards: _Optional[int] = ..., edited: _Optional[int] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("positions", "total", "forwards")
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedCompositeFieldContainer[DraftPosition]
    total: int
    forwards: int
    def __init__(self, positions: _Optional[_Iterable[_Union[DraftPosition, _Mapping]]] = ..., total: _Optional[int] = ..., forwards: _Optional[int] = ...) -> None: ...

class DraftPosition(_message.Message):
    __slots__ = ("index", "id", "text", "state", "confidence", "alternatives")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: int
    text: str
    state: DraftState
    confidence: float
    alternatives: _containers.RepeatedCompositeFieldContainer[DraftAlternative]
    def __init__(self, index: _Optional[int] = ..., id: _Optional[int] = ..., text: _Optional[str] = ..., state: _Optional[_Union[DraftState, str]] = ..., confidence: _Optional[float] = ..., alternatives: _Optional[_Iterable[_Union[DraftAlternative, _Mapping]]] = ...) -> None: ...

class DraftAlternative(_message.Message):
    __slots__ = ("id", "text", "probability")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    probability: float
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., probability: _Optional[float] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("id", "text", "log_probability", "text_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    log_probability: float
    text_bytes: bytes
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., log_probability: _Optional[float] = ..., text_bytes: _Optional[bytes] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "text", "usage", "forwards", "tokens_per_forward", "recomputed_tokens", "times", "warnings", "tokens", "edits", "closed_by_budget", "log_weight", "constraint", "companion_forwards", "holes", "tool_calls", "cut_call", "stop", "end_token")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_FORWARD_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EDITS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_BY_BUDGET_FIELD_NUMBER: _ClassVar[int]
    LOG_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    COMPANION_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    HOLES_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    CUT_CALL_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    text: str
    usage: Usage
    forwards: int
    tokens_per_forward: float
    recomputed_tokens: int
    times: StageTimes
    warnings: _containers.RepeatedScalarFieldContainer[str]
    tokens: _containers.RepeatedCompositeFieldContainer[CommittedToken]
    edits: int
    closed_by_budget: bool
    log_weight: float
    constraint: ConstraintStats
    companion_forwards: int
    holes: _containers.RepeatedScalarFieldContainer[str]
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    cut_call: ToolCall
    stop: str
    end_token: CommittedToken
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., text: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., forwards: _Optional[int] = ..., tokens_per_forward: _Optional[float] = ..., recomputed_tokens: _Optional[int] = ..., times: _Optional[_Union[StageTimes, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ..., tokens: _Optional[_Iterable[_Union[CommittedToken, _Mapping]]] = ..., edits: _Optional[int] = ..., closed_by_budget: bool = ..., log_weight: _Optional[float] = ..., constraint: _Optional[_Union[ConstraintStats, _Mapping]] = ..., companion_forwards: _Optional[int] = ..., holes: _Optional[_Iterable[str]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., cut_call: _Optional[_Union[ToolCall, _Mapping]] = ..., stop: _Optional[str] = ..., end_token: _Optional[_Union[CommittedToken, _Mapping]] = ...) -> None: ...

class ConstraintStats(_message.Message):
    __slots__ = ("steps", "fallbacks", "search_seconds", "late", "forward_seconds", "step_ms")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    SEARCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    FORWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    fallbacks: int
    search_seconds: float
    late: int
    forward_seconds: float
    step_ms: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, steps: _Optional[int] = ..., fallbacks: _Optional[int] = ..., search_seconds: _Optional[float] = ..., late: _Optional[int] = ..., forward_seconds: _Optional[float] = ..., step_ms: _Optional[_Iterable[float]] = ...) -> None: ...

class CommittedToken(_message.Message):
    __slots__ = ("id", "text", "log_probability", "step", "alternatives", "text_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    log_probability: float
    step: int
    alternatives: _containers.RepeatedCompositeFieldContainer[Alternative]
    text_bytes: bytes
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., log_probability: _Optional[float] = ..., step: _Optional[int] = ..., alternatives: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ..., text_bytes: _Optional[bytes] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "visual_tokens", "completion_tokens", "cached_tokens", "visual_tokens_before", "kv_positions", "reused_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VISUAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VISUAL_TOKENS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    KV_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    visual_tokens: int
    completion_tokens: int
    cached_tokens: int
    visual_tokens_before: int
    kv_positions: int
    reused_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., visual_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., visual_tokens_before: _Optional[int] = ..., kv_positions: _Optional[int] = ..., reused_tokens: _Optional[int] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("queue_ms", "encode_ms", "prefill_ms", "decode_ms", "total_ms", "first_token_ms", "first_draft_ms", "first_commit_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_COMMIT_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    encode_ms: float
    prefill_ms: float
    decode_ms: float
    total_ms: float
    first_token_ms: float
    first_draft_ms: float
    first_commit_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., encode_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., first_token_ms: _Optional[float] = ..., first_draft_ms: _Optional[float] = ..., first_commit_ms: _Optional[float] = ...) -> None: ...
