"""vLLM's own fields of bodies over a real socket, for every kind of model: each is honoured, or refused by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from e2e_helpers import running, settings
from gemma_checkpoints import LENGTH
from helpers import tokenizer
from kinds import BLOCK, BLOCKS, CAUSAL, KINDS, MASKED, RANDOM, every_kind
from qwen_checkpoints import MASK_ID
from test_e2e_http import CHAT, ask, free_port

#: Paths to what they ask.
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 16},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16},
}


#: Options of ``structured_outputs`` that vLLM's own client always sends.
UNSET = dict.fromkeys(("disable_any_whitespace", "disable_additional_properties", "disable_fallback"), False)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    models = every_kind(tmp_path_factory.mktemp("models"), prepare_blocks=_let_think)
    config = settings(server={"http_port": free_port()}, engine={"max_tokens": 128})
    with running(replace(config, models=models)) as found:
        yield found.background.config.server.http_port
        found.assert_serves()


def _let_think(folder: Path) -> None:
    """Give a saved tokenizer a template with an option, whose text is part of the prompt."""
    kept = tokenizer()
    template = "{% if enable_thinking is defined and enable_thinking %}{{ style or 'think' }} {% endif %}"
    kept.chat_template = template + str(kept.chat_template)
    kept.save_pretrained(folder)
    kept.chat_template = str(kept.chat_template).removeprefix(template)


def post(port: int, model: str, path: str = CHAT, **fields: Any) -> tuple[int, Any]:
    status, answer, _headers = ask(port, {"model": model, **ASKED[path], **fields}, path)
    return status, answer


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def refused(port: int, model: str, field: str, why: str, **fields: Any) -> None:
    status, answer = post(port, model, **fields)
    assert status == 400, answer
    assert (answer["error"]["param"], bool(re.search(why, answer["error"]["message"]))) == (field, True), answer


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize(
    ("fields", "obeyed"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}", **UNSET}}, lambda text: re.fullmatch("[a-c]{3}", text)),
        ({"structured_outputs": {"choice": ["left", "right"]}}, lambda text: text in ("left", "right")),
        ({"structured_outputs": {"json": {"type": "integer", "maximum": 9}}}, lambda text: json.loads(text) <= 9),
        ({"structured_outputs": {"json_object": True}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, lambda text: text in ("x", "y")),
        ({"guided_json": {"type": "boolean"}}, lambda text: text in ("true", "false")),
        ({"guided_regex": "[a-c]{3}"}, lambda text: re.fullmatch("[a-c]{3}", text)),
        ({"guided_choice": ["left", "right"]}, lambda text: text in ("left", "right")),
        ({"guided_grammar": 'start: "x" | "y"'}, lambda text: text in ("x", "y")),
    ],
)
def test_constraints_hold(port: int, model: str, fields: dict[str, Any], obeyed: Any) -> None:
    status, answer = post(port, model, **fields)
    assert status == 200 and obeyed(text_of(answer)), answer


@pytest.mark.parametrize("model", KINDS)
def test_constraints_that_cannot_be_kept_are_refused_by_name(port: int, model: str) -> None:
    refused(
        port, model, "structured_outputs.structural_tag", "not supported", structured_outputs={"structural_tag": {}}
    )
    refused(port, model, "structured_outputs.json", "", structured_outputs={"json": False})  # nothing obeys it
    refused(port, model, "guided_regex", "", guided_regex="[a-c")
    refused(
        port, model, "structured_outputs.grammar#/1", "not defined", structured_outputs={"grammar": "start: nothing"}
    )
    unknown = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/gone"}}}
    refused(port, model, "response_format.json_schema#/$ref", "names nothing", response_format=unknown)
    refused(port, model, "guided_whitespace_pattern", "not a field", guided_whitespace_pattern="x")
    both = {"guided_regex": "a", "structured_outputs": {"choice": ["a"]}}
    refused(port, model, "guided_regex", "combined with structured_outputs.choice", **both)


@pytest.mark.parametrize(("model", "own"), [(MASKED, 4), (BLOCKS, BLOCK), (RANDOM, LENGTH), (CAUSAL, 1)])
def test_a_canvas_length_is_the_length_of_blocks(port: int, model: str, own: int) -> None:
    status, answer = post(port, model, vllm_xargs={"diffusion_canvas_length": own})
    assert status == 200, answer
    field = "vllm_xargs.diffusion_canvas_length"
    refused(port, model, field, "at least 1", vllm_xargs={"diffusion_canvas_length": 0})
    if model == BLOCKS:  # what divides its blocks, too
        status, answer = post(port, model, vllm_xargs={"diffusion_canvas_length": 2})
        assert status == 200, answer
        refused(port, model, field, f"must divide {own}", vllm_xargs={"diffusion_canvas_length": 3})
    elif model != MASKED:
        refused(port, model, field, f"must be {own}", vllm_xargs={"diffusion_canvas_length": 2})


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(("model", "canvas"), [(MASKED, 4), (BLOCKS, BLOCK)])
def test_most_steps_bound_each_block(port: int, model: str, canvas: int, path: str) -> None:
    """Two steps a block: so many forwards, but for one a block that reads what became final."""
    xargs = {"diffusion_canvas_length": canvas, "diffusion_max_steps": 2}
    endless: dict[str, Any] = {} if path == "/v1/responses" else {"ignore_eos": True}
    exact = {"diffusion": {"quality": "QUALITY_EXACT"}}
    status, free = post(port, model, path, **endless, mmserve=exact)
    assert status == 200 and (not endless or free["mmserve"]["forwards"] >= 16), free
    blocks = 16 // canvas + 1  # the first and the last may be parts of one
    for own in ({}, {"mmserve": exact}, {"mmserve": {"diffusion": {"confident": {}}}}):
        status, bounded = post(port, model, path, **endless, vllm_xargs=xargs, **own)
        assert status == 200 and bounded["mmserve"]["forwards"] <= 3 * blocks, bounded


def test_most_steps_bound_each_canvas_of_random_tokens(port: int) -> None:
    canvases = -(-16 // LENGTH)
    for steps in (1, 2):
        status, answer = post(port, RANDOM, vllm_xargs={"diffusion_max_steps": steps})
        assert status == 200 and answer["mmserve"]["forwards"] <= steps * canvases, answer


def test_most_steps_that_cannot_be_kept_are_refused_by_name(port: int) -> None:
    field, one = "vllm_xargs.diffusion_max_steps", {"diffusion_max_steps": 1}
    refused(port, CAUSAL, field, "one token after another", vllm_xargs=one)
    for model in (MASKED, BLOCKS, RANDOM):
        refused(port, model, field, "at least 1", vllm_xargs={"diffusion_max_steps": 0})
        refused(port, model, field, "integer", vllm_xargs={"diffusion_max_steps": True})
        refused(port, model, field, "with steps", vllm_xargs=one, mmserve={"diffusion": {"steps": 4}})
    for model in (MASKED, BLOCKS):
        named = {"diffusion": {"threshold": {"confidence": 0.5}}}
        refused(port, model, field, "commit policy", vllm_xargs=one, mmserve=named)
        refused(
            port,
            model,
            field,
            "a quality other than exact",
            vllm_xargs=one,
            mmserve={"diffusion": {"quality": "QUALITY_FAST"}},
        )


@pytest.mark.parametrize("model", KINDS)
def test_token_ids_of_prompt_and_answer_and_the_stop_string(port: int, model: str) -> None:
    status, answer = post(port, model, return_token_ids=True)
    [choice] = answer["choices"]
    assert status == 200 and len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    text = tokenizer().decode(choice["token_ids"], skip_special_tokens=True)
    assert text.lstrip() == text_of(answer).lstrip() and choice["stop_reason"] is None
    for char in re.findall("[!-~]", text)[:1]:
        _, answer = post(port, model, stop=[char])
        assert [(one["finish_reason"], one["stop_reason"]) for one in answer["choices"]] == [("stop", char)]


def ids_of(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def tokens_of(answer: Any) -> list[str]:
    return [each["token"] for each in answer["choices"][0]["logprobs"]["content"]]


def mask_of(port: int, model: str) -> int:
    """The mask token, which a refusal names."""
    status, answer = post(port, model, vllm_xargs={"diffusion_seed_canvas": [5, 5], "diffusion_pinned": [0]})
    assert status == 400, answer
    found = re.search(r"the mask token (\d+) at position 1", answer["error"]["message"])
    assert found is not None and answer["error"]["param"] == "vllm_xargs.diffusion_seed_canvas", answer
    return int(found[1])


@pytest.mark.parametrize("model", [MASKED, BLOCKS])
def test_pinned_tokens_stand_in_the_answer_of_masks(port: int, model: str) -> None:
    mask = mask_of(port, model)
    assert model != BLOCKS or mask == MASK_ID
    pins = dict(zip((1, 2, 6, 9), range(40, 44), strict=True))
    seed = [pins.get(position, mask) for position in range(12)]
    free = {"temperature": 0, "logprobs": True, "ignore_eos": True}
    xargs = {"diffusion_seed_canvas": seed, "diffusion_pinned": list(pins)}
    status, answer = post(port, model, vllm_xargs=xargs, **free)
    assert status == 200, answer
    tokens = tokens_of(answer)
    assert len(tokens) == 16
    status, again = post(port, model, vllm_xargs=xargs, **free)
    assert (status, tokens_of(again)) == (200, tokens)
    # each of the pinned tokens as the model spells it where all others are pinned, too
    whole = [pins.get(position, 50) for position in range(12)]
    status, known = post(
        port, model, vllm_xargs={"diffusion_seed_canvas": whole, "diffusion_pinned": list(range(12))}, **free
    )
    assert status == 200, known
    assert [tokens[p] for p in pins] == [tokens_of(known)[p] for p in pins]
    assert {tokens_of(known)[p] for p in set(range(12)) - set(pins)} == {tokens_of(known)[0]}


def test_pinned_tokens_stand_in_the_answer_of_random_tokens(port: int) -> None:
    pins = dict(zip((0, 3, LENGTH - 1), range(40, 43), strict=True))
    seed = [pins.get(position, 60) for position in range(LENGTH)]
    given = {"diffusion_seed_canvas": seed, "diffusion_pinned": list(pins)}
    status, answer = post(port, RANDOM, vllm_xargs=given, logprobs=True, max_tokens=LENGTH)
    assert status == 200, answer
    spelled = [tokenizer().decode([token]) for token in pins.values()]
    assert [tokens_of(answer)[p] for p in pins] == spelled
    # a seed of which nothing is pinned is where the model begins: another one, another answer
    answers = set()
    for token in (60, 70, 80):
        one = {"diffusion_seed_canvas": [token] * LENGTH, "diffusion_max_steps": 1}
        status, answer = post(port, RANDOM, vllm_xargs=one, max_tokens=LENGTH)
        assert status == 200, answer
        answers.add(text_of(answer))
    assert len(answers) > 1


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize(
    ("xargs", "field", "why"),
    [
        ({"diffusion_seed_canvas": "abc"}, "diffusion_seed_canvas", "an array"),
        ({"diffusion_seed_canvas": [1, 2.5]}, "diffusion_seed_canvas[1]", "an integer"),
        ({"diffusion_seed_canvas": [1, True]}, "diffusion_seed_canvas[1]", "an integer"),
        ({"diffusion_seed_canvas": [-1]}, "diffusion_seed_canvas", "from 0"),
        ({"diffusion_pinned": [0]}, "diffusion_pinned", "needs diffusion_seed_canvas"),
        ({"diffusion_read_only": True}, "diffusion_read_only", "/v1/decisions"),
        ({"diffusion_samples": 4}, "diffusion_samples", "use n"),
        ({"no_such_field": 1}, "no_such_field", "not a known field"),
    ],
)
def test_wrong_fields_are_refused_by_name(port: int, model: str, xargs: Any, field: str, why: str) -> None:
    refused(port, model, f"vllm_xargs.{field}", why, vllm_xargs=xargs)


def test_seeds_that_are_no_canvas_are_refused_by_name(port: int) -> None:
    seed, pinned = "vllm_xargs.diffusion_seed_canvas", "vllm_xargs.diffusion_pinned"
    one = {"diffusion_seed_canvas": [5], "diffusion_pinned": [0]}
    refused(port, CAUSAL, seed, "one token after another", vllm_xargs=one)
    for model in (MASKED, BLOCKS):
        refused(port, model, seed, "constraint", vllm_xargs=one, guided_regex="a")
        refused(port, model, seed, "below", vllm_xargs={**one, "diffusion_seed_canvas": [1 << 30]})
        refused(port, model, pinned, "below 1", vllm_xargs={**one, "diffusion_pinned": [1]})
        refused(port, model, pinned, "open", vllm_xargs=one, max_tokens=1)
        long = {"diffusion_seed_canvas": [5] * 17, "diffusion_pinned": list(range(15))}
        refused(port, model, seed, "at most max_new_tokens, 16", vllm_xargs=long)
    refused(port, RANDOM, seed, f"must be {LENGTH}, the model's canvas", vllm_xargs=one)


@pytest.mark.parametrize("path", [path for path in ASKED if path != "/v1/completions"])
def test_template_options_reach_the_prompt(port: int, path: str) -> None:
    def prompt(**options: Any) -> int:
        status, answer = post(port, BLOCKS, path, chat_template_kwargs=options)
        assert status == 200, answer
        usage = answer["usage"]
        return int(usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))

    plain = prompt()
    assert prompt(enable_thinking=False) == plain
    assert prompt(enable_thinking=True) > plain
    # an option's text is only text: what spells a control token is as long as its letters
    spelled = prompt(enable_thinking=True, style="<|eot_id|>")
    assert spelled > prompt(enable_thinking=True, style="x") + 3


def test_template_options_that_no_template_reads_are_refused_by_name(port: int) -> None:
    for model in KINDS:
        for name in ("no_such_option", "messages", "tokenize", "add_generation_prompt", "bos_token"):
            field = f"chat_template_kwargs.{name}"
            refused(port, model, field, "no option of the model's chat template", chat_template_kwargs={name: False})
        refused(port, model, "chat_template_kwargs", "an object", chat_template_kwargs=[])
    refused(
        port, MASKED, "chat_template_kwargs.enable_thinking", "none", chat_template_kwargs={"enable_thinking": False}
    )
    refused(port, BLOCKS, "chat_template_kwargs.x", "reads enable_thinking, style", chat_template_kwargs={"x": 1})
    status, answer, _headers = ask(
        port, {"model": MASKED, "prompt": "a", "chat_template_kwargs": {"a": 1}}, "/v1/completions"
    )
    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")
