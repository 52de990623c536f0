"""Anthropic's messages and Open Responses over real sockets, by official clients; a compliance suite of all APIs."""

from __future__ import annotations

import base64
import random
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import llm_comply
import openai
import pydantic
import pytest
from e2e_helpers import PATIENCE, Running, running, settings
from llm_comply.config import ComplianceConfig
from llm_comply.runner import TestRunner as Runner
from llm_comply.schema import SpecLoader
from llm_comply.test_case import TestCase as Case
from llm_comply.tests import get_tests

from mmserve.client import Finished, Prefilled
from mmserve.config import ModelConfig
from mmserve.http import chat, messages, responses
from mmserve.reference.tasks import sample

#: API to the file with its schemas.
SPECS = {"openai-chat": "openai_chat.json", "anthropic": "anthropic.json", "open-responses": "openresponses.json"}
CASES = [(api, case) for api in SPECS for case in get_tests(api)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    config = settings(server={"http_port": free_port()}, engine={"max_tokens": 4096})
    models = (ModelConfig(path="bundled"), ModelConfig(path="bundled-causal"))
    with running(replace(config, models=models)) as found:
        yield found
        found.assert_serves()


@pytest.fixture(scope="module")
def url(served: Running) -> str:
    return f"http://127.0.0.1:{served.background.config.server.http_port}"


@pytest.mark.filterwarnings("ignore:jsonschema.RefResolver:DeprecationWarning")
@pytest.mark.parametrize(("api", "case"), CASES, ids=[f"{api}-{case.id}" for api, case in CASES])
def test_compliance(url: str, api: str, case: Case) -> None:
    spec = SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / SPECS[api]))
    # the diffusion model has no words for "Count from 1 to 5.", and the suite wants some; calls take it many passes
    causal = case.id == "anth-streaming-response" or "tool-calling" in case.id
    model = "bundled-causal" if causal else "bundled"
    runner = Runner(ComplianceConfig(f"{url}/v1", "any", model, timeout=PATIENCE), [case], spec)
    result = runner.run_one(case)
    if result.status.value == "skipped":
        pytest.skip(str(result.errors))
    assert not result.errors


@pytest.fixture
def of_anthropic(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=PATIENCE) as found:
        yield found


@pytest.fixture
def of_openai(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as found:
        yield found


def scene(seed: int) -> tuple[bytes, str]:
    picture, question = sample("count", random.Random(seed))
    return picture.png(), question.text


def test_messages_of_anthropic(served: Running, of_anthropic: anthropic.Anthropic) -> None:
    picture, text = scene(3)
    expected = served.client.generate(text, images=[picture], max_new_tokens=24)
    source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture).decode()}
    question = {"type": "text", "text": text}
    asked: Any = {
        "model": "bundled",
        "max_tokens": 24,
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}, question]}],
    }
    found = of_anthropic.messages.create(**asked)
    assert found.content[0].type == "text" and found.content[0].text == expected.text
    assert found.stop_reason == "end_turn" and found.usage.output_tokens == expected.usage.completion_tokens
    with of_anthropic.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == expected.text
        assert stream.get_final_message().usage.output_tokens == expected.usage.completion_tokens
    assert found._request_id and found.stop_sequence is None
    stops = ["#", expected.text[:1]]
    stopped = of_anthropic.messages.create(**asked, stop_sequences=stops)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stops[1])
    with of_anthropic.messages.stream(**asked, stop_sequences=stops) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", stops[1])
    for wrong, error in (
        ({"model": "gone"}, anthropic.NotFoundError),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError),
        ({"tools": [{"name": "f", "input_schema": {"type": "strange"}}]}, anthropic.BadRequestError),
    ):
        with pytest.raises(error) as refused:
            of_anthropic.messages.create(**{**asked, **wrong})
        assert refused.value.request_id == refused.value.body["request_id"]


class Scene(pydantic.BaseModel):
    colour: str
    count: int


def test_responses_of_openai(served: Running, of_openai: openai.OpenAI) -> None:
    picture, text = scene(4)
    expected = served.client.generate(text, images=[picture], max_new_tokens=24)
    image = "data:image/png;base64," + base64.b64encode(picture).decode()
    content = [{"type": "input_image", "image_url": image, "detail": "auto"}, {"type": "input_text", "text": text}]
    asked: Any = {"model": "bundled", "input": [{"role": "user", "content": content}], "max_output_tokens": 24}
    found = of_openai.responses.create(**asked)
    assert found.output_text == expected.text and found.status == "completed"
    assert found.usage is not None and found.usage.output_tokens == expected.usage.completion_tokens
    events = list(of_openai.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text
    parsed = of_openai.responses.parse(model="bundled", input="Describe it.", text_format=Scene, max_output_tokens=64)
    assert isinstance(parsed.output_parsed, Scene)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        of_openai.responses.create(**asked, previous_response_id="resp_1")


@pytest.mark.parametrize("model", ["bundled", "bundled-causal"])
def test_tokens_of_messages_are_counted(of_anthropic: anthropic.Anthropic, model: str) -> None:
    """Of text without a request, with an image by one: the same as the request's own."""
    data = base64.b64encode(scene(5)[0]).decode()
    image = {"type": "base64", "media_type": "image/png", "data": data}
    tool = {"name": "f", "description": "Weather", "input_schema": {"type": "object", "properties": {"city": {}}}}
    texts = [{"role": "user", "content": "How many shapes are there?"}]
    pictures = [{"role": "user", "content": [{"type": "image", "source": image}, {"type": "text", "text": "Well?"}]}]
    for chat_of in (texts, pictures):
        for more in (
            {},
            {"system": "Be brief."},
            {"tools": [tool]},
            {"tools": [tool], "tool_choice": {"type": "none"}},
        ):
            asked: Any = {"model": model, "messages": chat_of, **more}
            counted = of_anthropic.messages.count_tokens(**asked)
            usage = of_anthropic.messages.create(**asked, max_tokens=64).usage
            assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        of_anthropic.messages.count_tokens(model=model, messages=texts, extra_body={"max_tokens": 8})  # type: ignore[arg-type]
    with pytest.raises(anthropic.NotFoundError):
        of_anthropic.messages.count_tokens(model="gone", messages=texts)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["bundled", "bundled-causal"])
def test_a_stream_of_messages_begins_with_the_tokens_of_its_prompt(
    of_anthropic: anthropic.Anthropic, model: str
) -> None:
    chat_of: Any = [{"role": "user", "content": f"How many shapes are there? {model} " + "Look. " * 40}]
    asked: Any = {"model": model, "messages": chat_of, "max_tokens": 8}
    counted = of_anthropic.messages.count_tokens(model=model, messages=chat_of).input_tokens
    for cached in (False, True):
        first, *_, end, _stop = list(of_anthropic.messages.create(**asked, stream=True))
        assert first.type == "message_start" and end.type == "message_delta"
        begun = first.message.usage
        assert begun.input_tokens + (begun.cache_read_input_tokens or 0) == counted and begun.output_tokens == 0
        assert bool(begun.cache_read_input_tokens) == (cached and model == "bundled-causal")
        assert begun.cache_creation_input_tokens == 0 and begun.cache_creation is not None
        assert begun.cache_creation.ephemeral_5m_input_tokens == begun.cache_creation.ephemeral_1h_input_tokens == 0
        for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
            assert getattr(end.usage, name) == getattr(begun, name)
        assert end.usage.output_tokens > 0
        assert not set(end.usage.to_dict()) - set(anthropic.types.MessageDeltaUsage.model_fields)
    whole = of_anthropic.messages.create(**asked).usage
    assert whole.input_tokens + (whole.cache_read_input_tokens or 0) == counted
    assert not set(whole.to_dict()) - set(anthropic.types.Usage.model_fields)


def test_what_the_prompt_took_comes_before_the_answer_over_grpc(served: Running) -> None:
    events = list(served.client.stream("How many shapes are there?", n=2, max_new_tokens=8, prefilled=True))
    for number in range(2):
        first, *others = [event for event in events if getattr(event, "sample", None) == number]
        end = others[-1]
        assert isinstance(first, Prefilled) and isinstance(end, Finished)
        assert replace(end.usage, completion_tokens=0, kv_positions=0) == replace(first.usage, kv_positions=0)
    plain = served.client.stream("How many shapes are there?", max_new_tokens=8)
    assert not any(isinstance(event, Prefilled) for event in plain)


def test_more_tokens_than_a_model_has_are_as_many_as_fit(of_anthropic: anthropic.Anthropic) -> None:
    question: Any = [{"role": "user", "content": "How many shapes are there?"}]
    few, many = (
        of_anthropic.messages.create(model="bundled-causal", max_tokens=most, messages=question)
        for most in (16, 32_000)
    )
    assert many.content == few.content and many.stop_reason == "end_turn"


def test_models_for_anthropic(of_anthropic: anthropic.Anthropic) -> None:
    found = list(of_anthropic.models.list())
    assert found[0].id == found[0].display_name == "bundled" and found[0].type == "model"
    assert of_anthropic.models.retrieve("bundled-causal").display_name == "bundled-causal"


def test_log_probabilities_of_responses(of_openai: openai.OpenAI) -> None:
    asked: Any = {"model": "bundled", "input": "How many shapes are there?", "max_output_tokens": 8}
    chat: Any = {"model": "bundled", "messages": [{"role": "user", "content": asked["input"]}]}
    expected = (
        of_openai.chat.completions.create(**chat, max_tokens=8, logprobs=True, top_logprobs=3).choices[0].logprobs
    )
    found = of_openai.responses.create(**asked, top_logprobs=3)
    [part] = found.output[0].content  # type: ignore[union-attr]
    assert expected is not None and expected.content
    assert [one.model_dump() for one in part.logprobs] == [one.model_dump() for one in expected.content]  # type: ignore[union-attr]
    *_, last = of_openai.responses.create(**asked, include=["message.output_text.logprobs"], stream=True)
    [part] = last.response.output[0].content  # type: ignore[union-attr]
    assert [one.logprob for one in part.logprobs] == [one.logprob for one in expected.content]  # type: ignore[union-attr]
    assert not any(one.top_logprobs for one in part.logprobs)  # type: ignore[union-attr]
    for wrong in ({"top_logprobs": 21}, {"include": ["file_search_call.results"]}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            of_openai.responses.create(**asked, **wrong)


@pytest.mark.parametrize("model", ["bundled", "bundled-causal"])
def test_an_answer_without_an_end(served: Running, of_openai: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": [{"role": "user", "content": "How many shapes are there?"}]}
    found = of_openai.chat.completions.create(**asked, max_tokens=24, extra_body={"ignore_eos": True})
    assert found.choices[0].finish_reason == "length" and found.usage.completion_tokens == 24  # type: ignore[union-attr]
    same = served.client.generate("How many shapes are there?", model=model, max_new_tokens=24, ignore_end=True)
    assert same.text == found.choices[0].message.content


def test_every_field_is_in_the_documentation() -> None:
    table = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    for api in (chat, messages, responses):
        for name in (*api.SAMPLING, *api.NEUTRAL, *getattr(api, "LABELS", ())):
            assert f"`{name}`" in table, name


def test_an_answer_takes_what_fits_after_the_prompt(url: str, of_openai: openai.OpenAI) -> None:
    asked: Any = {"model": "bundled", "messages": [{"role": "user", "content": "How many shapes are there?"}]}
    most = of_openai.models.retrieve("bundled").model_extra["max_model_len"]  # type: ignore[index]
    found = of_openai.chat.completions.create(**asked, max_completion_tokens=most)
    fitting = most - found.usage.prompt_tokens  # type: ignore[union-attr]
    same = of_openai.chat.completions.create(**asked, max_completion_tokens=fitting)
    assert found.choices[0].message.content == same.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="must be in"):
        of_openai.chat.completions.create(**asked, max_completion_tokens=most + 1)
