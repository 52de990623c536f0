"""The client SDK: ``Client``, and ``AsyncClient`` with the same methods for asyncio.

::

    with Client("localhost:50051") as client:
        print(client.generate("What is left of the circle?", images=[Path("scene.png")]).text)
        for event in client.stream("Tell me more.", commit=Threshold(0.9)):
            ...

Streaming video has sessions: ``with client.video_session() as session``, see ``VideoSession``.

Every call has a deadline, and fails only with the errors exported here. Calls that the server has not begun to answer
are retried until the deadline if it is full and sends a time to retry after, or if it is restarting or unreachable.
"""

from mmserve.client.asynchronous import AsyncClient
from mmserve.client.asynchronous_video import AsyncAlerts, AsyncQuestion, AsyncVideoSession
from mmserve.client.blocking import Client
from mmserve.client.blocking_video import Alerts, Question, VideoSession
from mmserve.client.cache import Warmed
from mmserve.client.decisions import Answered, Choice, Decisions, Score, YesNo
from mmserve.client.options import Options
from mmserve.client.outgoing_constraint import Hole, Template
from mmserve.client.result import Result
from mmserve.client.session_options import SessionOptions
from mmserve.client.tls import TLS
from mmserve.client.tools import Call, Tool
from mmserve.core.cached import CacheEntry, Listing
from mmserve.core.events import (
    Admitted,
    Alternative,
    CommittedToken,
    ConstraintStats,
    Delta,
    Draft,
    DraftAlternative,
    DraftPosition,
    Event,
    Finished,
    Prefilled,
    PromptToken,
    Snapshot,
    StageTimes,
    ToolCallDelta,
    Usage,
)
from mmserve.core.info import ModelInfo
from mmserve.core.policies import (
    Adaptive,
    Blend,
    Confident,
    DkvDecode,
    DkvGreedy,
    DraftModel,
    EarlyCommit,
    Edit,
    EntropyBound,
    ExpectedAttention,
    Factor,
    Guided,
    HeavyHitters,
    KvShare,
    Learned,
    LegoLink,
    Ngram,
    RandomReuse,
    Scheduler,
    SinkWindow,
    Threshold,
    VisualCache,
)
from mmserve.core.request import ImagePart, Message, SeedCanvas, TextPart, TokensPart, VideoPart, VideoSampling
from mmserve.core.session import Alert, Asked, Moment, PushFailed, Statistics
from mmserve.core.tools import ToolCall
from mmserve.core.tuning import Measured, Pair, Tuning
from mmserve.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    FailedPrecondition,
    FieldViolation,
    Internal,
    InvalidArgument,
    MMServeError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    TLSError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)

__all__ = [
    "TLS",
    "Adaptive",
    "Admitted",
    "Alert",
    "Alerts",
    "Alternative",
    "Answered",
    "Asked",
    "AsyncAlerts",
    "AsyncClient",
    "AsyncQuestion",
    "AsyncVideoSession",
    "Blend",
    "CacheEntry",
    "Call",
    "Cancelled",
    "Choice",
    "Client",
    "CommittedToken",
    "Confident",
    "ConfigError",
    "ConstraintStats",
    "DeadlineExceeded",
    "Decisions",
    "Delta",
    "DkvDecode",
    "DkvGreedy",
    "Draft",
    "DraftAlternative",
    "DraftModel",
    "DraftPosition",
    "EarlyCommit",
    "Edit",
    "EntropyBound",
    "Event",
    "ExpectedAttention",
    "Factor",
    "FailedPrecondition",
    "FieldViolation",
    "Finished",
    "Guided",
    "HeavyHitters",
    "Hole",
    "ImagePart",
    "Internal",
    "InvalidArgument",
    "KvShare",
    "Learned",
    "LegoLink",
    "Listing",
    "MMServeError",
    "Measured",
    "Message",
    "ModelInfo",
    "Moment",
    "Ngram",
    "NotFound",
    "Options",
    "Pair",
    "PermissionDenied",
    "Prefilled",
    "PromptToken",
    "PushFailed",
    "Question",
    "RandomReuse",
    "ResourceExhausted",
    "Result",
    "Scheduler",
    "Score",
    "SeedCanvas",
    "SessionOptions",
    "SinkWindow",
    "Snapshot",
    "StageTimes",
    "Statistics",
    "TLSError",
    "Template",
    "TextPart",
    "Threshold",
    "TokensPart",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Tuning",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "VideoPart",
    "VideoSampling",
    "VideoSession",
    "VisualCache",
    "Warmed",
    "YesNo",
]
