"""Texts that an answer continues, and gaps that it fills, over real sockets."""

from __future__ import annotations

import base64
import json
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import current_thread
from typing import Any
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import openai
import pytest
import torch
from e2e_helpers import PATIENCE, Running, running, settings
from helpers import picture
from safetensors.torch import load_file
from test_e2e_http import ask
from transformers import LlamaConfig, LlamaForCausalLM

from mmserve.client import Hole, InvalidArgument, Message, TextPart, TokensPart
from mmserve.config import ModelConfig
from mmserve.http import completions, large, logprobs
from mmserve.models.chat import load_tokenizer, prompt_ids, text_ids
from mmserve.models.registry import model_folder
from mmserve.rpc import generation

MODELS = ("bundled", "bundled-causal")
#: Answers of as many tokens as may be.
ENDLESS = {"ignore_eos": True}
TEXT, SUFFIX = "Start with 3. Add 4.", " What is left?"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    models = (ModelConfig(path="bundled"), ModelConfig(path="bundled-causal"))
    with running(replace(settings(server={"http_port": port}), models=models)) as found:
        yield found
        found.assert_serves()


@pytest.fixture
def client(served: Running) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{served.background.config.server.http_port}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=PATIENCE) as found:
        yield found


@pytest.mark.parametrize("model", MODELS)
def test_a_text_is_continued_without_the_chat_template(served: Running, client: openai.OpenAI, model: str) -> None:
    expected = served.client.generate(TEXT, model=model, raw=True, max_new_tokens=8)
    tokenizer = load_tokenizer(Path(model_folder("bundled")))
    assert expected.usage.prompt_tokens == len(text_ids(tokenizer, TEXT)) < 24
    found = client.completions.create(model=model, prompt=TEXT, max_tokens=8, logprobs=0)
    assert found.choices[0].text == expected.text and found.usage is not None
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens
    assert found.choices[0].logprobs is not None
    assert "".join(found.choices[0].logprobs.tokens or ()) == expected.text
    chunks = list(client.completions.create(model=model, prompt=[TEXT], max_tokens=8, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected.text
    assert chunks[-1].choices[0].finish_reason == found.choices[0].finish_reason


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_may_be_token_ids(served: Running, client: openai.OpenAI, model: str) -> None:
    """Alone, and in an array beside texts; the answer is that of the text with these tokens."""
    ids = text_ids(load_tokenizer(Path(model_folder(model))), TEXT)
    expected = served.client.generate(TEXT, model=model, raw=True, max_new_tokens=8)
    own = served.client.generate([Message("user", (TokensPart(tuple(ids)),))], model=model, raw=True, max_new_tokens=8)
    assert (own.text, own.usage.prompt_tokens) == (expected.text, len(ids))
    for prompt, count in ((ids, 1), ([ids], 1), ([TEXT, ids], 2)):
        found = client.completions.create(model=model, prompt=prompt, max_tokens=8)  # type: ignore[arg-type]
        assert [choice.text for choice in found.choices] == [expected.text] * count
        assert found.usage is not None and found.usage.prompt_tokens == count * len(ids)


@pytest.mark.parametrize("model", MODELS)
def test_token_ids_and_the_prompt_are_returned_on_request(client: openai.OpenAI, model: str) -> None:
    """vLLM's ``return_token_ids``, and ``echo``: of completions and chats, whole and streamed."""
    tokenizer = load_tokenizer(Path(model_folder(model)))
    ids = text_ids(tokenizer, TEXT)
    prompts: Any = [TEXT, text_ids(tokenizer, SUFFIX)]
    asked: dict[str, Any] = {"model": model, "prompt": prompts, "max_tokens": 4, "n": 2, "temperature": 1.0}
    asked["extra_body"] = {**ENDLESS, "return_token_ids": True}
    plain = client.completions.create(**{**asked, "extra_body": ENDLESS})
    texts = [choice.text for choice in plain.choices]
    assert not any("ids" in name for name in plain.choices[0].to_dict())
    whole = [choice.to_dict() for choice in client.completions.create(**asked, echo=True).choices]
    assert [choice["text"] for choice in whole] == texts, "vLLM returns the ids of the prompt alone"
    assert [choice["prompt_token_ids"] for choice in whole] == [ids, ids, prompts[1], prompts[1]]
    assert [tokenizer.decode(choice["token_ids"]) for choice in whole] == texts and len(set(texts)) > 1
    chunks = [choice.to_dict() for each in client.completions.create(**asked, stream=True) for choice in each.choices]
    for index in range(4):
        first, *others = (chunk for chunk in chunks if chunk["index"] == index)
        assert first["prompt_token_ids"] == whole[index]["prompt_token_ids"]
        assert not any("prompt_token_ids" in chunk for chunk in others)
        assert others[-1]["token_ids"] == whole[index]["token_ids"] and "token_ids" not in first
    begun = [TEXT, TEXT, *[tokenizer.decode(prompts[1])] * 2]
    echoed: dict[str, Any] = {**asked, "extra_body": ENDLESS, "echo": True}
    found = client.completions.create(**echoed)
    expected = [before + text for before, text in zip(begun, texts, strict=True)]
    assert [choice.text for choice in found.choices] == expected and found.usage == plain.usage
    joined = [""] * 4
    for chunk in client.completions.create(**echoed, stream=True):
        for choice in chunk.choices:
            joined[choice.index] += choice.text
    assert joined == expected
    with pytest.raises(openai.BadRequestError, match="cannot be combined with suffix") as refused:
        client.completions.create(model=model, prompt=TEXT, echo=True, suffix=SUFFIX)
    assert refused.value.param == "echo"


@pytest.mark.parametrize("model", MODELS)
def test_a_chat_returns_token_ids_on_request(client: openai.OpenAI, model: str) -> None:
    chat: Any = [{"role": "user", "content": TEXT}]
    asked: dict[str, Any] = {"model": model, "messages": chat, "max_tokens": 4, "n": 2, "temperature": 1.0}
    asked["extra_body"] = {**ENDLESS, "return_token_ids": True}
    tokenizer = load_tokenizer(Path(model_folder(model)))
    whole = client.chat.completions.create(**asked).to_dict()
    assert whole["prompt_token_ids"] == prompt_ids(tokenizer, chat) and "logprobs" not in asked
    for choice in whole["choices"]:
        assert choice["logprobs"] is None and tokenizer.decode(choice["token_ids"]) == choice["message"]["content"]
    chunks = [chunk.to_dict() for chunk in client.chat.completions.create(**asked, stream=True)]
    for index in range(2):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert not any("prompt_token_ids" in chunk for chunk in own[1:])
        ids = [chunk["choices"][0].get("token_ids") for chunk in own]
        assert ids[-1] == whole["choices"][index]["token_ids"] and not any(ids[:-1])
    refused = {**asked, "extra_body": {"return_token_ids": 1}}
    with pytest.raises(openai.BadRequestError, match="return_token_ids: must be true or false"):
        client.chat.completions.create(**refused)


@pytest.fixture(scope="module")
def likely() -> Callable[[list[int]], torch.Tensor]:
    """Log-probabilities ``[n, V]`` after each of some tokens, by transformers' model."""
    folder = Path(model_folder("bundled-causal"))
    config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
    oracle: Any = LlamaForCausalLM(config).eval()
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    weights = {name: tensor.float() for file in files for name, tensor in file.items()}
    oracle.load_state_dict({name: weights[name] for name in oracle.state_dict()})

    def computed(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return torch.log_softmax(oracle(torch.tensor([ids])).logits[0], -1)

    return computed


@pytest.mark.parametrize("most", [0, 1])
def test_a_prompt_is_scored_as_by_a_forward_pass(
    client: openai.OpenAI, likely: Callable[[list[int]], torch.Tensor], most: int
) -> None:
    """``echo`` with ``logprobs``, as the harness of EleutherAI asks for log-likelihoods."""
    tokenizer = load_tokenizer(Path(model_folder("bundled-causal")))
    prompts = [text_ids(tokenizer, text) for text in (TEXT, SUFFIX)]
    asked: dict[str, Any] = {"model": "bundled-causal", "prompt": prompts, "max_tokens": most, "logprobs": 1}
    whole = client.completions.create(**asked, echo=True)
    assert whole.usage is not None and whole.usage.completion_tokens == 2 * most
    chunks = [*client.completions.create(**asked, echo=True, stream=True)]
    for ids, choice in zip(prompts, whole.choices, strict=True):
        scores = choice.logprobs
        assert scores is not None and scores.tokens and scores.token_logprobs and scores.top_logprobs
        assert scores.text_offset is not None and len(scores.tokens) == len(ids) + most
        assert "".join(scores.tokens) == choice.text and choice.text.startswith(tokenizer.decode(ids))
        pairs = zip(scores.text_offset, scores.tokens, strict=True)
        assert all(choice.text[at:].startswith(each) for at, each in pairs)
        assert (scores.token_logprobs[0], scores.top_logprobs[0]) == (None, None)
        expected = likely(ids)
        for at, token in enumerate(ids[1:], 1):
            row = expected[at - 1]
            assert scores.token_logprobs[at] == pytest.approx(float(row[token]), abs=0.05)
            best = max(scores.top_logprobs[at].values())
            assert best == pytest.approx(float(row.max()), abs=0.05) and len(scores.top_logprobs[at]) <= 2
        own = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        joined = [each.logprobs.to_dict() for each in own if each.logprobs is not None]
        for name, values in scores.to_dict().items():
            assert [value for each in joined for value in each[name]] == values, name  # type: ignore[attr-defined]
        assert "".join(each.text for each in own) == choice.text
        assert most or choice.finish_reason == own[-1].finish_reason == "length"


def test_continuations_are_scored_as_the_harness_of_eleuther_ai_asks(
    served: Running, client: openai.OpenAI, likely: Callable[[list[int]], torch.Tensor]
) -> None:
    """The body of its ``local-completions`` for multiple choice, read as it reads the response: without the last token,
    which is the one generated, also if that is the end token."""
    tokenizer = load_tokenizer(Path(model_folder("bundled-causal")))
    context = prompt_ids(tokenizer, [{"role": "user", "content": "Start with 7. Add 5. Add 3. What is the result?"}])
    choices = [text_ids(tokenizer, f"7+5=12\n12+3={x}\nAnswer: {x}")[1:] for x in (15, 16)]
    choices.append(choices[0][:3])
    body = {
        "model": "bundled-causal",
        "prompt": [context + choice for choice in choices],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    headers = {"content-type": "application/json", "authorization": "Bearer "}
    asked = HttpRequest(f"{client.base_url}completions", json.dumps(body).encode(), headers)
    with urlopen(asked, timeout=PATIENCE) as response:
        found = json.load(response)["choices"]
    sums, ends = [], set()
    for ids, choice in zip(choices, found, strict=True):
        scores = choice["logprobs"]
        assert len({len(values) for values in scores.values()}) == 1
        own, top = (scores[name][len(context) : -1] for name in ("token_logprobs", "top_logprobs"))
        expected = likely(context + ids)[len(context) - 1 : -1]
        rows = [float(row[token]) for row, token in zip(expected, ids, strict=True)]
        assert own == pytest.approx(rows, abs=0.05) and len(own) == len(ids)
        greedy = [row.argmax().item() == token for row, token in zip(expected, ids, strict=True)]
        assert [mine == max(best.values()) for mine, best in zip(own, top, strict=True)] == greedy
        whole = served.client.generate(
            [Message("user", (TokensPart((*context, *ids)),))],
            model="bundled-causal",
            raw=True,
            max_new_tokens=1,
            prompt_tokens=True,
            tokens=True,
        )
        assert whole.prompt is not None
        assert own == [token.log_probability for token in whole.prompt.prompt_tokens[len(context) :]]
        end = whole.end_token
        last = [*whole.tokens, *([] if end is None else [end])]
        assert [scores["token_logprobs"][-1]] == [token.log_probability for token in last]
        assert end is None or (end.text == scores["tokens"][-1] and choice["text"] == tokenizer.decode(context + ids))
        sums.append(sum(own))
        ends.add(end is None)
    assert sums[0] > sums[1] and ends == {True, False}


def test_a_prompt_that_fills_the_context_is_scored(
    served: Running, client: openai.OpenAI, likely: Callable[[list[int]], torch.Tensor]
) -> None:
    """No room is needed after it; an answer has none."""
    most = {info.name: info.max_tokens for info in served.client.models()}["bundled-causal"]
    tokenizer = load_tokenizer(Path(model_folder("bundled-causal")))
    ids = (text_ids(tokenizer, TEXT) * most)[:most]
    asked: dict[str, Any] = {"model": "bundled-causal", "prompt": ids, "max_tokens": 0, "logprobs": 0}
    found = client.completions.create(**asked, echo=True)
    scores = found.choices[0].logprobs
    assert found.usage is not None and (found.usage.prompt_tokens, found.usage.completion_tokens) == (most, 0)
    assert scores is not None and scores.token_logprobs is not None and scores.token_logprobs[0] is None
    expected = likely(ids)[torch.arange(most - 1), torch.tensor(ids[1:])]
    assert scores.token_logprobs[1:] == pytest.approx(expected.tolist(), abs=0.1)
    with pytest.raises(openai.BadRequestError, match=f"a prompt of {most} tokens and 1 new ones exceed the limit"):
        client.completions.create(**{**asked, "max_tokens": 1}, echo=True)
    with pytest.raises(InvalidArgument, match=rf"{most + 8} tokens exceeds the limit of {most}; shorten the prompt \("):
        text = tokenizer.decode(ids) + " a b c d e f"
        served.client.generate(text, model="bundled-causal", raw=True, max_new_tokens=0, prompt_tokens=True)


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_that_fills_the_context_is_echoed(served: Running, client: openai.OpenAI, model: str) -> None:
    """Without a pass of the model, for any number of choices."""
    most = {info.name: info.max_tokens for info in served.client.models()}[model]
    tokenizer = load_tokenizer(Path(model_folder(model)))
    ids = (text_ids(tokenizer, TEXT) * most)[:most]
    asked: dict[str, Any] = {"model": model, "prompt": [ids, TEXT], "max_tokens": 0, "echo": True, "n": 2}
    found = client.completions.create(**asked)
    texts = [tokenizer.decode(ids)] * 2 + [TEXT] * 2
    assert [(choice.text, choice.finish_reason) for choice in found.choices] == [(text, "length") for text in texts]
    assert found.usage is not None and found.usage.completion_tokens == 0
    assert found.usage.prompt_tokens == most + len(text_ids(tokenizer, TEXT))
    assert found.to_dict()["mmserve"]["forwards"] == 0  # type: ignore[index]
    streamed = [""] * 4
    for chunk in client.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    with pytest.raises(openai.BadRequestError, match=f"must hold 1 to {most} ids"):
        client.completions.create(**{**asked, "prompt": [*ids, 1]})
    with pytest.raises(openai.BadRequestError, match=f"a prompt of {most} tokens and 1 new ones exceed the limit"):
        client.completions.create(**{**asked, "max_tokens": 1})


def test_a_prompt_is_scored_in_the_format_of_vllm(
    served: Running, client: openai.OpenAI, likely: Callable[[list[int]], torch.Tensor]
) -> None:
    """``prompt_logprobs`` of completions and chats; over gRPC and in the SDK these are ``prompt_tokens``."""
    tokenizer = load_tokenizer(Path(model_folder("bundled-causal")))
    chat: Any = [{"role": "user", "content": TEXT}]
    asked: dict[str, Any] = {"model": "bundled-causal", "max_tokens": 1, "extra_body": {"prompt_logprobs": 2}}
    completion = client.completions.create(prompt=TEXT, **asked).choices[0].to_dict()
    whole = client.chat.completions.create(messages=chat, **asked).to_dict()
    ids = text_ids(tokenizer, TEXT)
    for row, own in ((completion, ids), (whole, prompt_ids(tokenizer, chat))):
        first, *others = row["prompt_logprobs"]  # type: ignore[index]
        assert first is None and len(others) == len(own) - 1
        expected = likely(own)
        for at, entry in enumerate(others, 1):
            found, best = entry[str(own[at])], next(each for each in entry.values() if each["rank"] == 1)
            assert found["logprob"] == pytest.approx(float(expected[at - 1, own[at]]), abs=0.05)
            assert found["decoded_token"] == tokenizer.decode([own[at]])
            assert best["logprob"] == pytest.approx(float(expected[at - 1].max()), abs=0.05)
            assert 2 <= len(entry) <= 3
    same = served.client.generate(
        TEXT, model="bundled-causal", raw=True, max_new_tokens=0, return_prompt=True, prompt_tokens=True
    )
    assert (same.text, same.finish_reason, same.usage.completion_tokens) == ("", "length", 0)
    assert same.prompt is not None and same.prompt.prompt_text.endswith(TEXT)
    assert list(same.prompt.prompt_ids) == [token.id for token in same.prompt.prompt_tokens] == ids
    for token, entry in zip(same.prompt.prompt_tokens, completion["prompt_logprobs"], strict=True):  # type: ignore
        assert token.log_probability == (None if entry is None else entry[str(token.id)]["logprob"])


def test_prompts_that_cannot_be_scored_are_refused_by_name(served: Running, client: openai.OpenAI) -> None:
    why = "log-probabilities of a prompt are only for autoregressive models"
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"echo": True, "logprobs": 1}, "echo", why),
        ({"extra_body": {"prompt_logprobs": 0}}, "prompt_logprobs", why),
        ({"model": "bundled-causal", "extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs", "at most 20"),
        ({"model": "bundled-causal", "extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs", "is out of range"),
        ({"stream": True, "extra_body": {"prompt_logprobs": 0}}, "prompt_logprobs", "is only for stream = false"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1, or 0 with echo"),
        ({"max_tokens": 0, "extra_body": {"return_token_ids": True}, "suffix": "b"}, "max_tokens", "without suffix"),
    ]
    for options, param, message in wrong:
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            client.completions.create(**{"model": "bundled", "prompt": TEXT, **options})
        assert refused.value.param == param, options
    for constraint in ({}, {"guided_regex": "abc"}):  # which a single token does not satisfy
        alone: Any = {"model": "bundled", "prompt": TEXT, "max_tokens": 0, "echo": True, "extra_body": constraint}
        found = client.completions.create(**alone).choices[0]
        assert (found.text, found.finish_reason) == (TEXT, "length")
    with pytest.raises(InvalidArgument, match=f"stream.prompt_tokens: {why}"):
        served.client.generate(TEXT, prompt_tokens=True)
    with pytest.raises(InvalidArgument, match=r"stream\.prompt_alternatives: must be 0 without prompt_tokens"):
        served.client.generate(TEXT, prompt_alternatives=1)
    with pytest.raises(InvalidArgument, match=r"sampling\.max_new_tokens: must be at least 1"):
        served.client.generate(TEXT, max_new_tokens=0)


@pytest.mark.parametrize("model", MODELS)
def test_log_probabilities_are_of_the_text_before_a_stop_string(client: openai.OpenAI, model: str) -> None:
    """Of completions and chats, whole and streamed; the token in which the stop string begins is one of them."""
    drawn: dict[str, Any] = {"model": model, "max_tokens": 12, "temperature": 1.5, "seed": 1, "extra_body": ENDLESS}
    asked: dict[str, Any] = {**drawn, "prompt": TEXT, "logprobs": 0}
    whole = client.completions.create(**asked).choices[0].logprobs
    assert whole is not None and whole.tokens and whole.text_offset
    starts, text = whole.text_offset, "".join(whole.tokens)
    cuts = (at for at in range(starts[1], len(text)) if text.find(text[at : at + 2]) == at)
    cut = max(cuts, key=lambda at: at not in starts)  # within a token, where one has two characters
    stopped: dict[str, Any] = {**asked, "stop": text[cut : cut + 2]}
    expected = [token for token, start in zip(whole.tokens, starts, strict=True) if start < cut]
    [choice] = client.completions.create(**stopped).choices
    assert (choice.text, choice.finish_reason) == (text[:cut], "stop")
    *_, last = client.completions.create(**stopped, stream=True)
    for found in (choice.logprobs, last.choices[0].logprobs):
        assert found is not None and found.tokens == expected
    none = client.completions.create(**{**stopped, "stop": text[:1]}).choices[0]
    assert none.text == "" and none.logprobs is not None and none.logprobs.tokens == []
    chat: dict[str, Any] = {**drawn, "messages": [{"role": "user", "content": TEXT}], "logprobs": True}
    said = client.chat.completions.create(**chat).choices[0].logprobs
    assert said is not None and said.content
    halted: dict[str, Any] = {**chat, "stop": said.content[-1].token}
    before = client.chat.completions.create(**halted).choices[0]
    *_, end = client.chat.completions.create(**halted, stream=True)
    for each in (before.logprobs, end.choices[0].logprobs):
        assert each is not None and each.content is not None
        assert "".join(token.token for token in each.content) == before.message.content


def test_large_responses_are_written_beside_the_event_loop(
    served: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of thousands of tokens took seconds, in which nothing else was answered."""
    threads, real = list[str](), logprobs.token_logprobs
    monkeypatch.setattr(logprobs, "token_logprobs", lambda t: (threads.append(current_thread().name), real(t))[1])
    asked: dict[str, Any] = {"model": "bundled-causal", "max_tokens": 4, "n": 2, "logprobs": True, "top_logprobs": 3}
    asked["messages"] = [{"role": "user", "content": "é"}]
    small = client.chat.completions.create(**asked)
    assert threads and not any(name.startswith("mmserve-http-parse") for name in threads)
    threads.clear()
    monkeypatch.setattr(large, "LARGE", 8)
    found = client.chat.completions.create(**asked)
    assert {name.rpartition("_")[0] for name in threads} == {"mmserve-http-parse"}
    assert found.choices == small.choices and found.usage is not None
    made, convert = list[str](), generation.to_response
    monkeypatch.setattr(generation, "LARGE", 8)
    monkeypatch.setattr(
        generation, "to_response", lambda *given: (made.append(current_thread().name), convert(*given))[1]
    )
    served.client.generate("é", model="bundled-causal", max_new_tokens=4, tokens=True, alternatives=3, ignore_end=True)
    first, *_, last = made
    assert last.startswith("asyncio_") and not first.startswith("asyncio_")


@pytest.mark.parametrize("model", MODELS)
def test_a_gap_in_a_text_is_filled(served: Running, client: openai.OpenAI, model: str) -> None:
    expected = served.client.generate(
        TEXT, model=model, raw=True, template=[Hole(max_tokens=6), SUFFIX], max_new_tokens=6 + len(SUFFIX)
    )
    assert expected.text.endswith(SUFFIX)
    asked: dict[str, Any] = {"model": model, "prompt": TEXT, "suffix": SUFFIX, "max_tokens": 6}
    across = expected.holes[0][-1:] + SUFFIX[:2]
    for stop in ([], ["left"], ["?"], [across]):  # in the suffix, and across its beginning
        assert client.completions.create(**asked, stop=stop).choices[0].text == expected.holes[0]
    chunks = [*client.completions.create(**asked, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.holes[0]
    ends = set()
    for size in (1, 2, 3, 6):
        found = client.completions.create(**{**asked, "max_tokens": size}, logprobs=0).choices[0]
        assert found.logprobs is not None and found.logprobs.tokens is not None
        assert found.finish_reason == ("length" if len(found.logprobs.tokens) == size else "stop")
        ends.add(found.finish_reason)
    assert "length" in ends or model == "bundled"  # which ends its gaps earlier
    assert chunks[-1].choices[0].finish_reason == found.finish_reason
    body = json.dumps({**asked, "random_seed": 1}).encode()
    headers = {"content-type": "application/json"}
    with urlopen(HttpRequest(f"{client.base_url}fim/completions", body, headers), timeout=PATIENCE) as answer:
        assert json.load(answer)["choices"][0]["message"]["content"] == expected.holes[0]


@pytest.mark.parametrize("model", MODELS)
def test_several_texts_are_continued_at_once(served: Running, client: openai.OpenAI, model: str) -> None:
    """As by a request for each."""
    texts = [TEXT, "What is left?"]
    options: dict[str, Any] = {"model": model, "max_tokens": 6, "n": 2, "temperature": 1.0, "extra_body": ENDLESS}
    alone = [client.completions.create(prompt=text, **options) for text in texts]
    expected = [choice for each in alone for choice in each.choices]
    found = client.completions.create(prompt=texts, **options)
    assert [choice.index for choice in found.choices] == list(range(4))
    assert [choice.text for choice in found.choices] == [choice.text for choice in expected]
    assert found.usage is not None
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(found.usage, name) == sum(getattr(each.usage, name) for each in alone)
    streamed = [""] * 4
    for chunk in client.completions.create(prompt=texts, stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in expected]


def test_what_cannot_be_continued_is_refused(served: Running, client: openai.OpenAI) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt": ["a"] * 17}, r"prompt: must hold at most 16 prompts with n = 1.*max_samples"),
        ({"prompt": [1, True]}, "prompt: must be a text or an array of token ids"),
        ({"prompt": ["a", [1, "b"]]}, r"prompt\[1\]: must be a text or an array of token ids"),
        ({"prompt": [1, 1 << 40]}, "prompt: must be a text or an array of token ids"),
        ({"prompt": [1, 1 << 20]}, "prompt.*: must hold token ids less than"),
        ({"prompt": [[1], [1, 1 << 20]]}, r"prompt\[1\].*: must hold token ids less than"),
        ({"prompt": [1] * 5000}, r"prompt.*: must hold 1 to \d+ ids, not 5000"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt: must hold at least one"),
        ({"logprobs": 200}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "b", "extra_body": {"guided_regex": "a"}}, "suffix"),
        ({"n": 1000}, "n"),
        ({"prompt": ["a", "b"], "n": 17}, r"n: must be in \[1, 16\]"),
    ]
    for options, field in wrong:
        with pytest.raises(openai.BadRequestError, match=field):
            client.completions.create(**{"model": "bundled", "prompt": TEXT, **options})
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(InvalidArgument, match="must be one message of ROLE_USER"):
        served.client.generate(chat, raw=True)
    tokens = TokensPart((1, 2))
    with pytest.raises(InvalidArgument, match="must be one message of ROLE_USER"):
        served.client.generate([Message("user", (tokens, TextPart("a")))], raw=True)
    with pytest.raises(InvalidArgument, match=r"parts\[0\].tokens: must not be set without raw"):
        served.client.generate([Message("user", (tokens,))])
    with pytest.raises(InvalidArgument, match=r"messages\[0\]: cannot be sent"):
        served.client.generate([Message("user", (TokensPart((-1,)),))], raw=True)


def test_control_tokens_of_a_text_are_text() -> None:
    tokenizer = load_tokenizer(Path(model_folder("bundled")))
    ids = text_ids(tokenizer, "a <|eot_id|> b")
    assert tokenizer.convert_tokens_to_ids("<|eot_id|>") not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "a <|eot_id|> b"


def test_every_field_is_in_the_documentation() -> None:
    table = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    for name in (*completions.SAMPLING, *completions.NEUTRAL, "prompt", "suffix", "random_seed"):
        assert f"`{name}`" in table, name


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_the_prompts_of_requests(served: Running, client: openai.OpenAI, model: str) -> None:
    """vLLM's ``/tokenize`` and ``/detokenize``: of texts, chats, tools, and chats with an image."""
    port, tokenizer = served.background.config.server.http_port, load_tokenizer(Path(model_folder(model)))
    most = {info.name: info.max_tokens for info in served.client.models()}[model]

    def asked(path: str, **body: Any) -> Any:
        status, answer, _headers = ask(port, {"model": model, **body}, path)
        assert status == 200, answer
        return answer

    def tokens(**body: Any) -> list[int]:
        found = asked("/tokenize", **body, return_token_strs=True)
        ids: list[int] = found["tokens"]
        assert (found["count"], found["max_model_len"]) == (len(ids), most)
        assert found["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert asked("/detokenize", tokens=ids) == {"prompt": text}
        return ids

    text = f"{TEXT} <|eot_id|> é"
    ids = tokens(prompt=text)
    assert ids == text_ids(tokenizer, text) and tokenizer.decode(ids).endswith(text)
    plain = tokens(prompt=text, add_special_tokens=False)
    assert ids[len(ids) - len(plain) :] == plain and tokens(prompt="", add_special_tokens=False) == []
    long = asked("/tokenize", prompt="a " * 2 * most)
    assert long["count"] > most and long["token_strs"] is None
    user, begun = {"role": "user", "content": TEXT}, {"role": "assistant", "content": "3+4="}
    url = "data:image/png;base64," + base64.b64encode(picture(1)).decode()
    sees = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    function = {"name": "f", "description": "Adds", "parameters": {"type": "object", "properties": {"a": {}}}}
    chats: list[dict[str, Any]] = [
        {"messages": [user]},
        {"messages": [user, begun], "continue_final_message": True, "add_generation_prompt": False},
        {"messages": [user], "tools": [{"type": "function", "function": function}]},
        {"messages": [sees, begun, user]},
    ]
    for chat in chats:
        body = {"model": model, **chat, "max_tokens": 64, "return_token_ids": True}
        status, answer, _headers = ask(port, body)
        assert status == 200 and tokens(**chat) == answer["prompt_token_ids"], answer
    closed = tokens(messages=[user], add_generation_prompt=False)
    whole = tokens(messages=[user])
    assert whole[: len(closed)] == closed and tokenizer.decode(whole[len(closed) :]).strip().endswith(
        "<|end_header_id|>"
    )
    wrong: list[tuple[str, dict[str, Any], str, int]] = [
        ("/tokenize", {}, "prompt: or messages must be set", 400),
        ("/tokenize", {"prompt": "a", "messages": [user]}, "prompt: or messages must be set", 400),
        ("/tokenize", {"prompt": ["a"]}, "prompt: must be a string", 400),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools: is only for messages", 400),
        ("/tokenize", {"prompt": "a" * 100 * most}, "prompt: .* characters are more than", 400),
        ("/tokenize", {"messages": []}, "messages: must hold at least one message", 400),
        ("/tokenize", {"messages": [user], "add_special_tokens": True}, "the chat template has them", 400),
        ("/tokenize", {"messages": [user], "continue_final_message": True}, "must be false unless the last", 400),
        ("/tokenize", {"messages": [sees], "add_generation_prompt": False}, "true with images and videos", 400),
        ("/tokenize", {"model": "gone", "prompt": "a"}, "no model 'gone'", 404),
        ("/tokenize", {"model": f"{model}:gone", "prompt": "a"}, "has no adapter 'gone'; there is: .*tools", 404),
        ("/detokenize", {"model": f"{model}:gone", "tokens": [1]}, "has no adapter 'gone'; there is: .*tools", 404),
        ("/v1/constraints", {"model": f"{model}:gone", "guided_regex": "a"}, "has no adapter 'gone'", 404),
        ("/detokenize", {"tokens": "a"}, "tokens: must be an array", 400),
        ("/detokenize", {"tokens": [1, True]}, r"tokens\[1\]: must be an integer", 400),
        ("/detokenize", {"tokens": [1 << 20]}, "tokens: must hold token ids from 0 to", 400),
        ("/detokenize", {"tokens": [-1]}, "tokens: must hold token ids from 0 to", 400),
        ("/detokenize", {}, "tokens: is required", 400),
    ]
    for path, body, why, expected in wrong:
        status, answer, _headers = ask(port, {"model": model, **body}, path)
        assert status == expected and re.search(why, answer["error"]["message"]), answer
