from mmserve.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecideRequest(_message.Message):
    __slots__ = ("model", "messages", "questions", "vision")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    VISION_FIELD_NUMBER: _ClassVar[int]
    model: str
    messages: _containers.RepeatedCompositeFieldContainer[_generation_pb2.ChatMessage]
    questions: _containers.RepeatedCompositeFieldContainer[DecisionQuestion]
    vision: _generation_pb2.VisionParams
    def __init__(self, model: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[_generation_pb2.ChatMessage, _Mapping]]] = ..., questions: _Optional[_Iterable[_Union[DecisionQuestion, _Mapping]]] = ..., vision: _Optional[_Union[_generation_pb2.VisionParams, _Mapping]] = ...) -> None: ...

class DecisionQuestion(_message.Message):
    __slots__ = ("id", "text", "instructions", "yes_no", "choice", "score")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    YES_NO_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    id: str
    text: str
    instructions: str
    yes_no: YesNoKind
    choice: ChoiceKind
    score: ScoreKind
    def __init__(self, id: _Optional[str] = ..., text: _Optional[str] = ..., instructions: _Optional[str] = ..., yes_no: _Optional[_Union[YesNoKind, _Mapping]] = ..., choice: _Optional[_Union[ChoiceKind, _Mapping]] = ..., score: _Optional[_Union[ScoreKind, _Mapping]] = ...) -> None: ...

class YesNoKind(_message.Message):
    __slots__ = ("yes", "no")
    YES_FIELD_NUMBER: _ClassVar[int]
    NO_FIELD_NUMBER: _ClassVar[int]
    yes: str
    no: str
    def __init__(self, yes: _Optional[str] = ..., no: _Optional[str] = ...) -> None: ...

class ChoiceKind(_message.Message):
    __slots__ = ("options",)
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, options: _Optional[_Iterable[str]] = ...) -> None: ...

class ScoreKind(_message.Message):
    __slots__ = ("low", "high", "levels")
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    low: int
    high: int
    levels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, low: _Optional[int] = ..., high: _Optional[int] = ..., levels: _Optional[_Iterable[str]] = ...) -> None: ...

class DecideResponse(_message.Message):
    __slots__ = ("model", "decisions", "usage", "forwards", "times")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    model: str
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    usage: _generation_pb2.Usage
    forwards: int
    times: _generation_pb2.StageTimes
    def __init__(self, model: _Optional[str] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ..., forwards: _Optional[int] = ..., times: _Optional[_Union[_generation_pb2.StageTimes, _Mapping]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("id", "answer", "probabilities", "mass", "expected")
    ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    MASS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    id: str
    answer: str
    probabilities: _containers.RepeatedCompositeFieldContainer[AnswerProbability]
    mass: float
    expected: float
    def __init__(self, id: _Optional[str] = ..., answer: _Optional[str] = ..., probabilities: _Optional[_Iterable[_Union[AnswerProbability, _Mapping]]] = ..., mass: _Optional[float] = ..., expected: _Optional[float] = ...) -> None: ...

class AnswerProbability(_message.Message):
    __slots__ = ("answer", "probability")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    answer: str
    probability: float
    def __init__(self, answer: _Optional[str] = ..., probability: _Optional[float] = ...) -> None: ...
