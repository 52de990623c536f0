"""Typed questions as messages: what the request to the engine is."""

from __future__ import annotations

import pytest
from echo_server import model_info as info

from mmserve.core.decisions import INSTRUCTION
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.rpc.decision_messages import generation_of, parse_decisions
from mmserve.v1 import decision_pb2 as pb
from mmserve.v1 import generation_pb2


def test_the_instruction_follows_the_context_in_the_user_s_last_message() -> None:
    image = generation_pb2.ContentPart(image=generation_pb2.Image(data=b"png"))
    shown = generation_pb2.ChatMessage(role=generation_pb2.ROLE_USER, parts=[image])
    told = generation_pb2.ChatMessage(role=generation_pb2.ROLE_USER, parts=[generation_pb2.ContentPart(text="red")])
    said = generation_pb2.ChatMessage(role=generation_pb2.ROLE_ASSISTANT, parts=told.parts)
    for messages, texts in (
        ([shown], ["", "Answer"]),
        ([told], ["red", "\nAnswer"]),
        ([told, said], ["Answer"]),
        ([], ["Answer"]),
    ):
        made = generation_of(pb.DecideRequest(model="echo:tuned", messages=messages), info(decisions="together"))
        last = made.messages[-1]
        assert last.role == generation_pb2.ROLE_USER
        assert [part.text[: len(text)] for part, text in zip(last.parts, texts, strict=True)] == texts
        assert last.parts[-1].text.strip() == INSTRUCTION and made.model == "echo:tuned"  # an adapter of it
    with pytest.raises(Unimplemented, match="answers no typed questions"):
        generation_of(pb.DecideRequest(), info(decisions=""))


def test_more_than_256_questions_are_refused() -> None:
    message = pb.DecideRequest(questions=[pb.DecisionQuestion(text="a", yes_no=pb.YesNoKind())] * 257)
    with pytest.raises(InvalidArgument, match="questions: must be 1 to 256, not 257"):
        parse_decisions(message)
    del message.questions[256:]
    ids, questions = parse_decisions(message)
    assert ids[:2] == ("1", "2") and len(questions) == 256


def test_questions_of_more_text_than_is_tokenised_at_once_are_refused() -> None:
    message = pb.DecideRequest(questions=[pb.DecisionQuestion(text="a" * 40_000, yes_no=pb.YesNoKind())] * 2)
    with pytest.raises(InvalidArgument, match="questions: have 80000 characters together, and at most 65536 are read"):
        parse_decisions(message)
