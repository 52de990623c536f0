"""The client SDK: ``Client``, and ``AsyncClient`` with the same methods for asyncio.

::

    with Client("localhost:50051") as client:
        print(client.generate("What is left of the circle?", images=[Path("scene.png")]).text)
        for event in client.stream("Tell me more.", commit=Threshold(0.9)):
            ...

Every call has a deadline, and fails only with the errors of ``mmserve.errors``. What surely was not begun is tried
again: while a server is full and says when it will not be, until the deadline would pass; a few times where it cannot
be reached.
"""

from mmserve.client.asynchronous import AsyncClient
from mmserve.client.blocking import Client
from mmserve.client.connection import TLS
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
from mmserve.core.request import ImagePart, Message, TextPart, VideoPart
from mmserve.rpc.options import Options
from mmserve.rpc.outgoing_constraint import Hole, Template
from mmserve.rpc.policies import (
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
from mmserve.rpc.result import Result

__all__ = [
    "TLS",
    "Adaptive",
    "Admitted",
    "AsyncClient",
    "Blend",
    "Client",
    "CommittedToken",
    "Confident",
    "ConstraintStats",
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
    "Finished",
    "Guided",
    "HeavyHitters",
    "Hole",
    "ImagePart",
    "KvShare",
    "Learned",
    "LegoLink",
    "Message",
    "ModelInfo",
    "Ngram",
    "Options",
    "RandomReuse",
    "Result",
    "Scheduler",
    "SinkWindow",
    "Snapshot",
    "StageTimes",
    "Template",
    "TextPart",
    "Threshold",
    "Usage",
    "VideoPart",
    "VisualCache",
]
