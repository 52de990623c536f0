"""Adapters of a checkpoint's own: sessions with a model that keeps no K/V of frames use the one for streams, typed
questions the one for decisions, and requests with tools the one for tools, unless they name another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from video_client import picture, sdk, video_server

from mmserve.client import Threshold, Tool, YesNo
from mmserve.config import ModelConfig
from mmserve.errors import InvalidArgument, NotFound
from mmserve.models.base import LoadedModel
from mmserve.models.checkpoint import GENERATION
from mmserve.models.registry import load_model
from mmserve.reference.low_rank import add_low_rank, write_adapter
from mmserve.reference.model import ReferenceModel

QUESTIONS = ("what is it?", "How many shapes are there?", "Is there a red circle?", "What happens?")


def bundled(folder: Path, path: str) -> LoadedModel:
    """A bundled model with four random adapters in its checkpoint; ``other`` has blocks of 4 tokens."""
    model = load_model(ModelConfig(path=path))
    assert isinstance(model, LoadedModel)
    for seed, name in enumerate(("decisions", "other", "streams", "tools")):
        torch.manual_seed(seed)
        made = ReferenceModel(model.vocab_size, causal=model.spec.causal)
        add_low_rank(made, 4, output=name == "tools")
        for parameter_name, parameter in made.named_parameters():
            if parameter_name.endswith(".0.b"):
                torch.nn.init.normal_(parameter, std=0.4)
        write_adapter(made, folder / name)
    (folder / "other" / GENERATION).write_text('{"block_length": 4}')
    return replace(model, adapters=folder)


def test_a_session_uses_the_adapter_for_streams_or_the_one_it_names(tmp_path: Path) -> None:
    with video_server(model=bundled(tmp_path, "bundled")) as (address, _), sdk(address) as client:

        def answers(model: str) -> list[str]:
            with client.video_session(model=model, budget=200) as session:
                for number in range(3):
                    session.push(picture(number, (40, 40)), float(number))
                return [session.stream(asked, max_new_tokens=12).result().text for asked in QUESTIONS]

        assert [adapter.name for adapter in client.adapters()] == ["decisions", "other", "streams", "tools"]
        default, other = answers(""), answers("bundled:other")
        assert default == answers("bundled:streams") != other
        client.drop_adapter("streams")
        assert answers("") not in (default, other)
        with pytest.raises(NotFound, match="no adapter 'streams'"):
            answers("bundled:streams")


def test_a_model_that_keeps_k_and_v_of_frames_takes_no_adapter_in_sessions(tmp_path: Path) -> None:
    with video_server(model=bundled(tmp_path, "bundled-causal")) as (address, _), sdk(address) as client:
        with pytest.raises(InvalidArgument, match="keeps K/V of the frames without it"):
            client.video_session(model="bundled-causal:streams").__enter__()
        with client.video_session() as session:
            session.push(picture(0, (40, 40)), 0.0)
            assert session.stream("what is it?", max_new_tokens=2).result()


def test_typed_questions_use_the_adapter_for_decisions_or_the_one_they_name(tmp_path: Path) -> None:
    with video_server(model=bundled(tmp_path, "bundled")) as (address, _), sdk(address) as client:

        def probability(model: str) -> float:
            [answered] = client.decide("A red circle.", [YesNo("Is it red?")], model=model).answers
            return answered.probabilities["yes"]

        default, other = probability(""), probability("bundled:other")
        assert default == probability("bundled:decisions") != other
        client.drop_adapter("decisions")
        assert probability("") not in (default, other)


def test_the_most_steps_of_a_block_are_those_of_the_adapters_block(tmp_path: Path) -> None:
    with video_server(model=bundled(tmp_path, "bundled")) as (address, _), sdk(address) as client:
        lengths = {adapter.name: adapter.block_length for adapter in client.adapters()}
        assert lengths == {"decisions": 0, "other": 4, "streams": 0, "tools": 0}

        def forwards(model: str, **options: Any) -> int:
            return client.generate("A red circle.", model=model, max_new_tokens=16, ignore_end=True, **options).forwards

        assert forwards("bundled:other", max_steps=2) == 8 and forwards("bundled", max_steps=2) == 2
        assert forwards("bundled:other", max_steps=2, block_length=16) == 2, "which the request sets"
        quick: dict[str, Any] = {"commit": Threshold(0.01), "max_steps": 4}
        assert forwards("bundled:other", **quick) <= 16, "a block of 4 never takes more steps"
        with pytest.raises(InvalidArgument, match="must not be set with a commit policy"):
            forwards("bundled", **quick)
        with client.video_session(model="bundled", budget=200) as session:
            session.push(picture(0, (40, 40)), 0.0)
            asked: dict[str, Any] = {"max_new_tokens": 16, "ignore_end": True, "max_steps": 2}
            found = [session.stream("what is it?", adapter=name, **asked).result() for name in ("other", "streams")]
            assert [each.forwards for each in found] == [8, 2], "as requests that name these adapters"


def test_requests_with_tools_use_the_adapter_for_tools_or_the_one_they_name(tmp_path: Path) -> None:
    with video_server(model=bundled(tmp_path, "bundled")) as (address, _), sdk(address) as client:
        tool = Tool(name="find", parameters={"type": "object", "properties": {"word": {"enum": ["a", "b", "c", "d"]}}})

        def answer(model: str, **choice: Any) -> str:
            result = client.generate("Find it.", tools=[tool], model=model, max_new_tokens=48, **choice)
            return result.text + "".join(call.arguments for call in result.tool_calls)

        default, other = answer(""), answer("bundled:other")
        assert default == answer("bundled:tools") != other
        plain = answer("", tool_choice="none", ignore_end=True)
        assert plain != answer("bundled:tools", tool_choice="none", ignore_end=True), (
            "tools that are not shown need no adapter"
        )
        shown = client.generate("Find it.", tools=[tool], max_new_tokens=48).usage.prompt_tokens
        assert client.cache.warm("Find it.", tools=[tool], tool_choice="required").prompt_tokens == shown
        hidden = client.cache.warm("Find it.", tools=[tool], tool_choice="none").prompt_tokens
        assert hidden == client.cache.warm("Find it.").prompt_tokens < shown
        client.drop_adapter("tools")
        assert answer("") not in (default, other)
