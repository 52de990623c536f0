"""The client SDK: ``Client``, and ``AsyncClient`` with the same methods for asyncio.

::

    with Client("localhost:50051") as client:
        print(client.generate("What is left of the circle?", images=[Path("scene.png")]).text)
        for event in client.stream("Tell me more.", commit=Threshold(0.9)):
            ...

Streaming video has sessions: ``with client.video_session() as session``, see ``VideoSession``.

Every call has a deadline, and fails only with the errors exported here. What the server has not begun to answer is
tried again until the deadline: where it is full and reports when it will not be, and where it restarts or cannot be
reached.
"""

from mmserve.client.asynchronous import AsyncClient
from mmserve.client.asynchronous_video import AsyncAlerts, AsyncQuestion, AsyncVideoSession
from mmserve.client.blocking import Client
from mmserve.client.blocking_video import Alerts, Question, VideoSession
from mmserve.client.options import Options
from mmserve.client.outgoing_constraint import Hole, Template
from mmserve.client.result import Result
from mmserve.client.session_options import SessionOptions
from mmserve.client.tls import TLS
from mmserve.core.events import (
    Admitted,
    CommittedToken,
    ConstraintStats,
    Delta,
    Event,
    Finished,
    Snapshot,
    StageTimes,
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
from mmserve.core.request import ImagePart, Message, TextPart, VideoPart, VideoSampling
from mmserve.core.session import Alert, Asked, Moment, PushFailed, Statistics
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
    "Asked",
    "AsyncAlerts",
    "AsyncClient",
    "AsyncQuestion",
    "AsyncVideoSession",
    "Blend",
    "Cancelled",
    "Client",
    "CommittedToken",
    "Confident",
    "ConfigError",
    "ConstraintStats",
    "DeadlineExceeded",
    "Delta",
    "DkvDecode",
    "DkvGreedy",
    "DraftModel",
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
    "MMServeError",
    "Measured",
    "Message",
    "ModelInfo",
    "Moment",
    "Ngram",
    "NotFound",
    "Options",
    "Pair",
    "PushFailed",
    "Question",
    "RandomReuse",
    "ResourceExhausted",
    "Result",
    "Scheduler",
    "SessionOptions",
    "SinkWindow",
    "Snapshot",
    "StageTimes",
    "Statistics",
    "TLSError",
    "Template",
    "TextPart",
    "Threshold",
    "Tuning",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "VideoPart",
    "VideoSampling",
    "VideoSession",
    "VisualCache",
]
