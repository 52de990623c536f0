from mmserve.v1 import decision_pb2 as _decision_pb2
from mmserve.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OverloadPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OVERLOAD_POLICY_UNSPECIFIED: _ClassVar[OverloadPolicy]
    OVERLOAD_POLICY_BLOCK: _ClassVar[OverloadPolicy]
    OVERLOAD_POLICY_DROP_OLDEST: _ClassVar[OverloadPolicy]
    OVERLOAD_POLICY_THIN: _ClassVar[OverloadPolicy]
OVERLOAD_POLICY_UNSPECIFIED: OverloadPolicy
OVERLOAD_POLICY_BLOCK: OverloadPolicy
OVERLOAD_POLICY_DROP_OLDEST: OverloadPolicy
OVERLOAD_POLICY_THIN: OverloadPolicy

class SessionRequest(_message.Message):
    __slots__ = ("index", "received", "configure", "resume", "push_image", "push_segment", "ask", "cancel_ask", "watch", "unwatch", "get_statistics", "close", "decide")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    PUSH_IMAGE_FIELD_NUMBER: _ClassVar[int]
    PUSH_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    CANCEL_ASK_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    UNWATCH_FIELD_NUMBER: _ClassVar[int]
    GET_STATISTICS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    DECIDE_FIELD_NUMBER: _ClassVar[int]
    index: int
    received: int
    configure: ConfigureSession
    resume: ResumeSession
    push_image: PushImage
    push_segment: PushSegment
    ask: Ask
    cancel_ask: CancelAsk
    watch: Watch
    unwatch: Unwatch
    get_statistics: GetStatistics
    close: CloseSession
    decide: Decide
    def __init__(self, index: _Optional[int] = ..., received: _Optional[int] = ..., configure: _Optional[_Union[ConfigureSession, _Mapping]] = ..., resume: _Optional[_Union[ResumeSession, _Mapping]] = ..., push_image: _Optional[_Union[PushImage, _Mapping]] = ..., push_segment: _Optional[_Union[PushSegment, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., cancel_ask: _Optional[_Union[CancelAsk, _Mapping]] = ..., watch: _Optional[_Union[Watch, _Mapping]] = ..., unwatch: _Optional[_Union[Unwatch, _Mapping]] = ..., get_statistics: _Optional[_Union[GetStatistics, _Mapping]] = ..., close: _Optional[_Union[CloseSession, _Mapping]] = ..., decide: _Optional[_Union[Decide, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("index", "configured", "acknowledged", "frames_taken", "push_failed", "answer", "alert", "watch_state", "statistics", "go_away", "closed")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    FRAMES_TAKEN_FIELD_NUMBER: _ClassVar[int]
    PUSH_FAILED_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    ALERT_FIELD_NUMBER: _ClassVar[int]
    WATCH_STATE_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    GO_AWAY_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    index: int
    configured: SessionConfigured
    acknowledged: Acknowledged
    frames_taken: FramesTaken
    push_failed: PushFailed
    answer: AnswerEvent
    alert: Alert
    watch_state: WatchState
    statistics: SessionStatistics
    go_away: GoAway
    closed: SessionClosed
    def __init__(self, index: _Optional[int] = ..., configured: _Optional[_Union[SessionConfigured, _Mapping]] = ..., acknowledged: _Optional[_Union[Acknowledged, _Mapping]] = ..., frames_taken: _Optional[_Union[FramesTaken, _Mapping]] = ..., push_failed: _Optional[_Union[PushFailed, _Mapping]] = ..., answer: _Optional[_Union[AnswerEvent, _Mapping]] = ..., alert: _Optional[_Union[Alert, _Mapping]] = ..., watch_state: _Optional[_Union[WatchState, _Mapping]] = ..., statistics: _Optional[_Union[SessionStatistics, _Mapping]] = ..., go_away: _Optional[_Union[GoAway, _Mapping]] = ..., closed: _Optional[_Union[SessionClosed, _Mapping]] = ...) -> None: ...

class ConfigureSession(_message.Message):
    __slots__ = ("model", "memory", "sampler", "overload", "sampling", "diffusion", "vision", "open_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    OVERLOAD_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DIFFUSION_FIELD_NUMBER: _ClassVar[int]
    VISION_FIELD_NUMBER: _ClassVar[int]
    OPEN_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    memory: StreamMemory
    sampler: FrameSampler
    overload: OverloadPolicy
    sampling: _generation_pb2.SamplingParams
    diffusion: _generation_pb2.DiffusionParams
    vision: _generation_pb2.VisionParams
    open_id: str
    def __init__(self, model: _Optional[str] = ..., memory: _Optional[_Union[StreamMemory, _Mapping]] = ..., sampler: _Optional[_Union[FrameSampler, _Mapping]] = ..., overload: _Optional[_Union[OverloadPolicy, str]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., diffusion: _Optional[_Union[_generation_pb2.DiffusionParams, _Mapping]] = ..., vision: _Optional[_Union[_generation_pb2.VisionParams, _Mapping]] = ..., open_id: _Optional[str] = ...) -> None: ...

class StreamMemory(_message.Message):
    __slots__ = ("policy", "positions", "budget", "host_bytes", "carriers")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    CARRIERS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    positions: str
    budget: int
    host_bytes: int
    carriers: int
    def __init__(self, policy: _Optional[str] = ..., positions: _Optional[str] = ..., budget: _Optional[int] = ..., host_bytes: _Optional[int] = ..., carriers: _Optional[int] = ...) -> None: ...

class FrameSampler(_message.Message):
    __slots__ = ("rate", "scene_similarity", "scene_frames", "detail_every")
    RATE_FIELD_NUMBER: _ClassVar[int]
    SCENE_SIMILARITY_FIELD_NUMBER: _ClassVar[int]
    SCENE_FRAMES_FIELD_NUMBER: _ClassVar[int]
    DETAIL_EVERY_FIELD_NUMBER: _ClassVar[int]
    rate: float
    scene_similarity: float
    scene_frames: int
    detail_every: int
    def __init__(self, rate: _Optional[float] = ..., scene_similarity: _Optional[float] = ..., scene_frames: _Optional[int] = ..., detail_every: _Optional[int] = ...) -> None: ...

class ResumeSession(_message.Message):
    __slots__ = ("resume_handle",)
    RESUME_HANDLE_FIELD_NUMBER: _ClassVar[int]
    resume_handle: str
    def __init__(self, resume_handle: _Optional[str] = ...) -> None: ...

class PushImage(_message.Message):
    __slots__ = ("data", "seconds", "url")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    seconds: float
    url: str
    def __init__(self, data: _Optional[bytes] = ..., seconds: _Optional[float] = ..., url: _Optional[str] = ...) -> None: ...

class PushSegment(_message.Message):
    __slots__ = ("data", "init", "start_seconds", "url")
    DATA_FIELD_NUMBER: _ClassVar[int]
    INIT_FIELD_NUMBER: _ClassVar[int]
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    init: bytes
    start_seconds: float
    url: str
    def __init__(self, data: _Optional[bytes] = ..., init: _Optional[bytes] = ..., start_seconds: _Optional[float] = ..., url: _Optional[str] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("question_id", "request", "now", "interval", "everything", "timeout_seconds")
    QUESTION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    question_id: str
    request: _generation_pb2.GenerateRequest
    now: Now
    interval: Interval
    everything: Everything
    timeout_seconds: float
    def __init__(self, question_id: _Optional[str] = ..., request: _Optional[_Union[_generation_pb2.GenerateRequest, _Mapping]] = ..., now: _Optional[_Union[Now, _Mapping]] = ..., interval: _Optional[_Union[Interval, _Mapping]] = ..., everything: _Optional[_Union[Everything, _Mapping]] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class Decide(_message.Message):
    __slots__ = ("question_id", "messages", "questions", "now", "interval", "everything", "timeout_seconds")
    QUESTION_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    question_id: str
    messages: _containers.RepeatedCompositeFieldContainer[_generation_pb2.ChatMessage]
    questions: _containers.RepeatedCompositeFieldContainer[_decision_pb2.DecisionQuestion]
    now: Now
    interval: Interval
    everything: Everything
    timeout_seconds: float
    def __init__(self, question_id: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[_generation_pb2.ChatMessage, _Mapping]]] = ..., questions: _Optional[_Iterable[_Union[_decision_pb2.DecisionQuestion, _Mapping]]] = ..., now: _Optional[_Union[Now, _Mapping]] = ..., interval: _Optional[_Union[Interval, _Mapping]] = ..., everything: _Optional[_Union[Everything, _Mapping]] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class Now(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Everything(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Interval(_message.Message):
    __slots__ = ("begin_seconds", "end_seconds")
    BEGIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    END_SECONDS_FIELD_NUMBER: _ClassVar[int]
    begin_seconds: float
    end_seconds: float
    def __init__(self, begin_seconds: _Optional[float] = ..., end_seconds: _Optional[float] = ...) -> None: ...

class CancelAsk(_message.Message):
    __slots__ = ("question_id",)
    QUESTION_ID_FIELD_NUMBER: _ClassVar[int]
    question_id: str
    def __init__(self, question_id: _Optional[str] = ...) -> None: ...

class Watch(_message.Message):
    __slots__ = ("watch_id", "text", "yes_no", "choices", "on_threshold", "off_threshold", "min_interval_seconds", "frames", "min_mass")
    WATCH_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    YES_NO_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    ON_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    OFF_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    MIN_INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    MIN_MASS_FIELD_NUMBER: _ClassVar[int]
    watch_id: str
    text: str
    yes_no: YesNo
    choices: WatchChoices
    on_threshold: float
    off_threshold: float
    min_interval_seconds: float
    frames: int
    min_mass: float
    def __init__(self, watch_id: _Optional[str] = ..., text: _Optional[str] = ..., yes_no: _Optional[_Union[YesNo, _Mapping]] = ..., choices: _Optional[_Union[WatchChoices, _Mapping]] = ..., on_threshold: _Optional[float] = ..., off_threshold: _Optional[float] = ..., min_interval_seconds: _Optional[float] = ..., frames: _Optional[int] = ..., min_mass: _Optional[float] = ...) -> None: ...

class YesNo(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchChoices(_message.Message):
    __slots__ = ("options", "wanted")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    options: _containers.RepeatedScalarFieldContainer[str]
    wanted: str
    def __init__(self, options: _Optional[_Iterable[str]] = ..., wanted: _Optional[str] = ...) -> None: ...

class Unwatch(_message.Message):
    __slots__ = ("watch_id",)
    WATCH_ID_FIELD_NUMBER: _ClassVar[int]
    watch_id: str
    def __init__(self, watch_id: _Optional[str] = ...) -> None: ...

class GetStatistics(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseSession(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionConfigured(_message.Message):
    __slots__ = ("resume_handle", "resume_seconds", "idle_seconds", "model", "config", "limits", "resumed")
    RESUME_HANDLE_FIELD_NUMBER: _ClassVar[int]
    RESUME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    resume_handle: str
    resume_seconds: float
    idle_seconds: float
    model: str
    config: ConfigureSession
    limits: SessionLimits
    resumed: bool
    def __init__(self, resume_handle: _Optional[str] = ..., resume_seconds: _Optional[float] = ..., idle_seconds: _Optional[float] = ..., model: _Optional[str] = ..., config: _Optional[_Union[ConfigureSession, _Mapping]] = ..., limits: _Optional[_Union[SessionLimits, _Mapping]] = ..., resumed: bool = ...) -> None: ...

class SessionLimits(_message.Message):
    __slots__ = ("max_request_bytes", "max_questions", "max_watches")
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_WATCHES_FIELD_NUMBER: _ClassVar[int]
    max_request_bytes: int
    max_questions: int
    max_watches: int
    def __init__(self, max_request_bytes: _Optional[int] = ..., max_questions: _Optional[int] = ..., max_watches: _Optional[int] = ...) -> None: ...

class Acknowledged(_message.Message):
    __slots__ = ("index", "credit")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    index: int
    credit: Credit
    def __init__(self, index: _Optional[int] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("pushes", "bytes")
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    pushes: int
    bytes: int
    def __init__(self, pushes: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class FramesTaken(_message.Message):
    __slots__ = ("taken", "dropped", "seconds", "ready_seconds")
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    READY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    taken: int
    dropped: int
    seconds: float
    ready_seconds: float
    def __init__(self, taken: _Optional[int] = ..., dropped: _Optional[int] = ..., seconds: _Optional[float] = ..., ready_seconds: _Optional[float] = ...) -> None: ...

class PushFailed(_message.Message):
    __slots__ = ("request_index", "error")
    REQUEST_INDEX_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_index: int
    error: SessionError
    def __init__(self, request_index: _Optional[int] = ..., error: _Optional[_Union[SessionError, _Mapping]] = ...) -> None: ...

class AnswerEvent(_message.Message):
    __slots__ = ("question_id", "asked", "response", "error", "decided", "moments")
    QUESTION_ID_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    question_id: str
    asked: Asked
    response: _generation_pb2.GenerateResponse
    error: SessionError
    decided: _decision_pb2.DecideResponse
    moments: _containers.RepeatedCompositeFieldContainer[Moment]
    def __init__(self, question_id: _Optional[str] = ..., asked: _Optional[_Union[Asked, _Mapping]] = ..., response: _Optional[_Union[_generation_pb2.GenerateResponse, _Mapping]] = ..., error: _Optional[_Union[SessionError, _Mapping]] = ..., decided: _Optional[_Union[_decision_pb2.DecideResponse, _Mapping]] = ..., moments: _Optional[_Iterable[_Union[Moment, _Mapping]]] = ...) -> None: ...

class Moment(_message.Message):
    __slots__ = ("begin", "end", "seconds", "ambiguous")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    AMBIGUOUS_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    seconds: int
    ambiguous: bool
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ..., seconds: _Optional[int] = ..., ambiguous: bool = ...) -> None: ...

class Asked(_message.Message):
    __slots__ = ("frames", "begin_seconds", "end_seconds", "recomputed_rows")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    BEGIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    END_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    frames: int
    begin_seconds: float
    end_seconds: float
    recomputed_rows: int
    def __init__(self, frames: _Optional[int] = ..., begin_seconds: _Optional[float] = ..., end_seconds: _Optional[float] = ..., recomputed_rows: _Optional[int] = ...) -> None: ...

class Alert(_message.Message):
    __slots__ = ("watch_id", "active", "probability", "mass", "seconds", "answer")
    WATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    MASS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    watch_id: str
    active: bool
    probability: float
    mass: float
    seconds: float
    answer: str
    def __init__(self, watch_id: _Optional[str] = ..., active: bool = ..., probability: _Optional[float] = ..., mass: _Optional[float] = ..., seconds: _Optional[float] = ..., answer: _Optional[str] = ...) -> None: ...

class WatchState(_message.Message):
    __slots__ = ("watch_id", "accepted", "removed", "error")
    WATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    watch_id: str
    accepted: WatchAccepted
    removed: WatchRemoved
    error: SessionError
    def __init__(self, watch_id: _Optional[str] = ..., accepted: _Optional[_Union[WatchAccepted, _Mapping]] = ..., removed: _Optional[_Union[WatchRemoved, _Mapping]] = ..., error: _Optional[_Union[SessionError, _Mapping]] = ...) -> None: ...

class WatchAccepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRemoved(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionStatistics(_message.Message):
    __slots__ = ("frames_taken", "frames_dropped", "pushes_failed", "questions", "alerts", "resumes", "waiting_bytes", "kept_rows", "evicted_rows", "kv_bytes", "feature_bytes", "seconds")
    FRAMES_TAKEN_FIELD_NUMBER: _ClassVar[int]
    FRAMES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FAILED_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    ALERTS_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    WAITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_ROWS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    FEATURE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    frames_taken: int
    frames_dropped: int
    pushes_failed: int
    questions: int
    alerts: int
    resumes: int
    waiting_bytes: int
    kept_rows: int
    evicted_rows: int
    kv_bytes: int
    feature_bytes: int
    seconds: float
    def __init__(self, frames_taken: _Optional[int] = ..., frames_dropped: _Optional[int] = ..., pushes_failed: _Optional[int] = ..., questions: _Optional[int] = ..., alerts: _Optional[int] = ..., resumes: _Optional[int] = ..., waiting_bytes: _Optional[int] = ..., kept_rows: _Optional[int] = ..., evicted_rows: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., feature_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class GoAway(_message.Message):
    __slots__ = ("time_left_seconds", "reason")
    TIME_LEFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    time_left_seconds: float
    reason: str
    def __init__(self, time_left_seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class SessionClosed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionError(_message.Message):
    __slots__ = ("code", "message", "wrong_fields", "retry_after_seconds", "error_id")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WRONG_FIELDS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_ID_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    wrong_fields: _containers.RepeatedCompositeFieldContainer[WrongField]
    retry_after_seconds: float
    error_id: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., wrong_fields: _Optional[_Iterable[_Union[WrongField, _Mapping]]] = ..., retry_after_seconds: _Optional[float] = ..., error_id: _Optional[str] = ...) -> None: ...

class WrongField(_message.Message):
    __slots__ = ("field", "description")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    field: str
    description: str
    def __init__(self, field: _Optional[str] = ..., description: _Optional[str] = ...) -> None: ...
