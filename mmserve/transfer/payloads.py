"""The kinds of payload that can be serialized, and the version of each.

The version must be incremented with any change of a kind's fields: servers with another version then reject it.
"""

from __future__ import annotations

from mmserve.core.branches import Branches
from mmserve.core.candidates import Alternatives, Candidates
from mmserve.core.canvas import Canvas
from mmserve.core.canvas_record import CanvasRecord
from mmserve.core.constraint_state import (
    ConstraintState,
    GapState,
    LanguageState,
    MeterState,
    RankedState,
    RunState,
    SampledState,
    WitnessState,
)
from mmserve.core.encoded import DeepStack, Encoded, Past, Span
from mmserve.core.payloads import (
    CanvasPayload,
    EncodedPayload,
    GuidanceState,
    KVChunk,
    KVState,
    PrefilledPayload,
    TextState,
    VisualPayload,
)
from mmserve.core.stream_state import ArchiveState, EncodedFrameState, FrameState, RowsState, StreamPayload, UnitsState
from mmserve.transfer.codec import Kinds
from mmserve.transfer.kv_coding import CodedTensor

PAYLOADS = Kinds(
    {
        EncodedPayload: 2,
        PrefilledPayload: 8,
        CanvasPayload: 9,
        VisualPayload: 1,
        KVChunk: 1,
        StreamPayload: 1,
    },
    (
        *(
            Alternatives,
            Branches,
            Candidates,
            Canvas,
            CanvasRecord,
            CodedTensor,
            DeepStack,
            Encoded,
            GuidanceState,
            KVState,
            Past,
            Span,
            TextState,
        ),
        *(ConstraintState, GapState, LanguageState, MeterState, RankedState, RunState, SampledState),
        WitnessState,
        *(ArchiveState, FrameState, RowsState, EncodedFrameState, UnitsState),
    ),
    views=(KVState, KVChunk, RowsState),
)
