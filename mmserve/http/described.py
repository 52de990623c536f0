"""Descriptions of every field of every request body: the JSON schema of its values, and its effect.

Used for ``/openapi.json`` and the tables of docs/api.md; a test compares the names with those that are read.
"""

from __future__ import annotations

from mmserve.http import chat, completions, messages, responses
from mmserve.http.api import EFFORTS, TIERS, VERBOSITIES
from mmserve.http.content import ROLES
from mmserve.http.field_schemas import (
    LABEL,
    OBJECT,
    TEXT,
    Field,
    Schema,
    any_of,
    array,
    hint,
    labels,
    neutral,
    numbers,
    object_of,
    part_of,
)
from mmserve.http.media import DETAILS
from mmserve.http.shared_fields import (
    ALTERNATIVES,
    BIAS,
    COMMON,
    CONSTRAINTS,
    CONTINUED,
    EXAMPLES,
    FORMAT,
    METADATA,
    REASONING,
    RESPONSE_FORMAT,
    STOPS,
    STREAM_OPTIONS,
    TEMPLATE_KWARGS,
    TOOL,
    TOOL_FIELDS,
    URL,
    XARGS,
    prompt_logprobs,
    tools_of,
)

_ANY_PART = {"type": "object", "required": ["type"], "properties": {"type": TEXT}}
_CHAT_PARTS = any_of(
    part_of("text", "text", text=TEXT),
    part_of(
        "image_url", "image_url", image_url=any_of(URL, object_of(["url"], url=URL, detail={"enum": list(DETAILS)}))
    ),
    part_of("video_url", "video_url", video_url=object_of(["url"], url=URL)),
    part_of("refusal", "refusal", refusal=TEXT),
)
_CHAT_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": any_of(TEXT, array(_CHAT_PARTS), {"type": "null"}),
        "tool_calls": array(OBJECT),
        "tool_call_id": TEXT,
        "name": TEXT,
    },
}
_QUESTION = "Hi"
_NESTED = {"type": "function", "function": TOOL}
_FLAT = {"type": "function", **TOOL}
_CHAT_FIELDS = {
    **COMMON,
    **XARGS,
    **TEMPLATE_KWARGS,
    "messages": Field(
        array(_CHAT_MESSAGE, minItems=1),
        "the answer is a new message, also after one of the assistant, unless it continues that. Parts: text; "
        "images and videos as a `data:` URL (base64), an http or https URL of a host in `[media] url_hosts`, or the "
        "media id of an upload over gRPC",
        [{"role": "user", "content": _QUESTION}],
        required=True,
    ),
    "continue_final_message": CONTINUED,
    "echo": Field(
        {"type": "boolean"}, "vLLM's: if the last message is an assistant's, its text comes before the answer's", True
    ),
    "add_generation_prompt": Field({"type": "boolean"}, "`true`, or `false` with `continue_final_message`", True),
    **numbers(chat.SAMPLING, EXAMPLES),
    "stop": STOPS,
    "logit_bias": BIAS,
    "stream_options": STREAM_OPTIONS,
    "logprobs": Field(
        {"type": "boolean"},
        "log-probabilities of the chosen tokens, before temperature; in a stream with the last chunk of a choice",
        True,
    ),
    "top_logprobs": Field({"type": "integer", "minimum": 0, "maximum": 20}, f"{ALTERNATIVES}, with `logprobs`", 0),
    "prompt_logprobs": prompt_logprobs("the response"),
    "return_token_ids": Field(
        {"type": "boolean"},
        "vLLM's: the response, or the first chunk of each choice, has `prompt_token_ids`, and each choice, in a stream "
        "its last chunk, `token_ids`: those of its text and calls, without an end token",
        True,
    ),
    **tools_of(_NESTED),
    **neutral(chat.NEUTRAL),
    "reasoning_effort": hint(EFFORTS, REASONING),
    "verbosity": hint(VERBOSITIES),
    "service_tier": hint(TIERS),
    **labels(chat.LABELS),
    "metadata": METADATA,
    "prediction": Field(OBJECT, LABEL, {"type": "content", "content": "a"}),
}
_TOKEN_IDS = array({"type": "integer", "minimum": 0}, minItems=1)
_COMPLETION_FIELDS = {
    **COMMON,
    **XARGS,
    "prompt": Field(
        any_of(TEXT, _TOKEN_IDS, array(any_of(TEXT, _TOKEN_IDS), minItems=1)),
        "a text or an array of token ids, or an array of several of these, of which prompt `i` has the choices from "
        "`i * n` on; at most `[engine] max_samples` choices. Each prompt counts in the limits of the tenant; an error "
        "of one ends all",
        _QUESTION,
        required=True,
    ),
    "suffix": Field(TEXT, "fill-in-the-middle: the text after the gap, which `max_tokens` and `stop` are for", "b"),
    **numbers(completions.SAMPLING, EXAMPLES),
    "max_tokens": Field(
        {"type": "integer", "minimum": 0},
        "largest number of tokens of the answer, at least 1, or 0 with `echo`, `prompt_logprobs` or "
        f"`return_token_ids`; default {completions.DEFAULT_TOKENS}",
        4,
    ),
    "stop": STOPS,
    "logit_bias": BIAS,
    "stream_options": STREAM_OPTIONS,
    "logprobs": Field(
        {"type": "integer", "minimum": 0, "maximum": 20},
        "log-probabilities of the chosen tokens, before temperature, and of this many most probable tokens of each "
        "position, at most 20, besides the chosen one; in a stream with the last chunk of a choice",
        2,
    ),
    "echo": Field(
        {"type": "boolean"},
        "the text begins with that of the prompt, unless `return_token_ids` asks for its ids (as in vLLM); with "
        "`logprobs`, which is then only for autoregressive models, these begin with those of the prompt's tokens, null "
        "for the first; not with `suffix`",
        True,
    ),
    "prompt_logprobs": prompt_logprobs("each choice"),
    "return_token_ids": Field(
        {"type": "boolean"},
        "vLLM's: each choice, in a stream its first chunk, has `prompt_token_ids`, and, in a stream its last chunk, "
        "`token_ids`: those of its text, without an end token",
        True,
    ),
    **neutral(completions.NEUTRAL),
    **labels(completions.LABELS),
}
_MESSAGE_FIELDS = {
    **COMMON,
    **XARGS,
    **TEMPLATE_KWARGS,
    "system": Field(
        any_of(TEXT, array(part_of("text", "text", text=TEXT, cache_control=OBJECT))),
        "the system message",
        "Be brief.",
    ),
    "messages": Field(
        array(
            object_of(["role", "content"], role={"enum": ["user", "assistant"]}, content=any_of(TEXT, array(_ANY_PART)))
        ),
        _CHAT_FIELDS["messages"].meaning,
        [{"role": "user", "content": _QUESTION}],
        required=True,
    ),
    **numbers(messages.SAMPLING, EXAMPLES),
    "max_tokens": Field(
        {"type": "integer", "minimum": 1},
        "largest number of tokens of the answer; reduced to what fits, and to the model's `max_canvas`",
        4,
        required=True,
    ),
    "stop_sequences": STOPS,
    "output_config": Field(
        object_of(format=FORMAT, effort={"enum": list(EFFORTS)}),
        "`format`: as `response_format`; `effort` has no effect",
        {"format": {"type": "text"}, "effort": "low"},
    ),
    "thinking": Field(
        object_of(type={"enum": list(messages.THINKING)}, budget_tokens={"type": "integer"}, display=TEXT),
        f"{REASONING}; thinking blocks in `messages` are ignored",
        {"type": "enabled", "budget_tokens": 1024},
    ),
    "context_management": Field(
        object_of(edits=array({"type": "object", "properties": {"type": {"pattern": "^clear_thinking_"}}})),
        "edits that clear thinking blocks; no effect",
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "tools": Field(array(OBJECT), TOOL_FIELDS["tools"].meaning, [{"name": "f", "input_schema": TOOL["parameters"]}]),
    "tool_choice": Field(OBJECT, "`auto`, `any`, `tool` or `none` as its `type`", {"type": "none"}),
    **neutral(messages.NEUTRAL),
    "metadata": Field(object_of(user_id=TEXT), LABEL, {"user_id": "a"}),
    "cache_control": Field(OBJECT, LABEL, {"type": "ephemeral"}),
}
_RESPONSE_FIELDS = {
    **COMMON,
    **XARGS,
    **TEMPLATE_KWARGS,
    "input": Field(
        any_of(TEXT, array(OBJECT)),
        "a text, or a list of messages, function calls, their results and reasoning items; no other kinds of items",
        _QUESTION,
        required=True,
    ),
    "continue_final_message": CONTINUED,
    "instructions": Field(TEXT, "the system message", "Be brief."),
    **numbers(responses.SAMPLING, EXAMPLES),
    "stream_options": Field(object_of(include_obfuscation={"type": "boolean"}), "accepted; no effect", {}),
    "text": Field(
        object_of(format=FORMAT, verbosity={"enum": list(VERBOSITIES)}),
        "`format`: as `response_format`; `verbosity` has no effect",
        {"format": {"type": "text"}, "verbosity": "low"},
    ),
    **tools_of(_FLAT),
    "top_logprobs": Field(
        {"type": "integer", "minimum": 0, "maximum": 20},
        f"{ALTERNATIVES}, with the chosen token; in a stream, at the end of the text; not for function calls",
        2,
    ),
    "include": Field(
        array({"enum": [responses.LOGPROBS, responses.REASONING]}),
        f"`{responses.LOGPROBS}`; `{responses.REASONING}` is accepted and never present",
        [responses.LOGPROBS, responses.REASONING],
    ),
    "reasoning": Field(
        object_of(**{name: {"enum": list(accepted)} for name, (accepted, _why) in responses.HINTS.items()}),
        f"{REASONING}; reasoning items in `input` are ignored",
        {"effort": "low", "summary": "auto"},
    ),
    **neutral(responses.NEUTRAL),
    "service_tier": hint(TIERS),
    **labels(responses.LABELS),
    "metadata": METADATA,
    "client_metadata": METADATA,
}
_DECISION_QUESTIONS = array({"type": "object", "required": ["type"], "properties": {"type": TEXT}})
_TEMPLATE_OPTIONS = Field(
    {"type": "object", "maxProperties": 0}, "must be empty: options of chat templates are not supported here", {}
)
_IMAGES = Field(array(any_of(URL, OBJECT)), "images that belong to the context, as URLs", [])
_ANY_JSON: Schema = {}

_COUNTED = (
    *("model", "system", "messages", "tools", "tool_choice", "output_config"),
    *("thinking", "context_management", "cache_control", "chat_template_kwargs"),
)

#: The fields of a body by name, for each path.
BODIES: dict[str, dict[str, Field]] = {
    "/v1/chat/completions": _CHAT_FIELDS,
    "/v1/completions": _COMPLETION_FIELDS,
    "/v1/fim/completions": {
        **_COMPLETION_FIELDS,
        "prompt": Field(
            any_of(TEXT, _TOKEN_IDS, array(any_of(TEXT, _TOKEN_IDS), minItems=1, maxItems=1)),
            "one text or array of token ids",
            _QUESTION,
            required=True,
        ),
        **numbers({"random_seed": "sampling.seed"}, EXAMPLES),
        "max_tokens": Field(
            {"type": "integer", "minimum": 1},
            f"largest number of tokens of the answer, at least 1; default {completions.DEFAULT_TOKENS}",
            4,
        ),
        **neutral(completions.FIM_NEUTRAL),
    },
    "/v1/responses": _RESPONSE_FIELDS,
    "/v1/messages": _MESSAGE_FIELDS,
    "/v1/messages/count_tokens": {name: _MESSAGE_FIELDS[name] for name in _COUNTED},
    "/tokenize": {
        "model": COMMON["model"],
        "prompt": Field(TEXT, "a text, which is tokenised as in completions: it has no control tokens", _QUESTION),
        "messages": Field(
            _CHAT_FIELDS["messages"].schema,
            "a chat, as in chat completions; either this or `prompt` is required",
            _CHAT_FIELDS["messages"].example,
        ),
        "add_special_tokens": Field(
            {"type": "boolean"},
            "whether a text has the tokenizer's special tokens, such as that of its beginning; default true. With "
            "`messages` it must be false: the chat template has them",
            False,
        ),
        "add_generation_prompt": Field(
            {"type": "boolean"},
            "whether a chat ends with the beginning of an answer; default true; it must be false with "
            "`continue_final_message`, and true with images and videos",
            False,
        ),
        "continue_final_message": Field(
            {"type": "boolean"}, "whether a chat ends within its last message, an assistant's text", False
        ),
        "return_token_strs": Field(
            {"type": "boolean"},
            "whether the response has `token_strs`, the names of the tokens in the vocabulary",
            True,
        ),
        "tools": Field(array(OBJECT), "functions that the chat template describes", [_NESTED]),
        **TEMPLATE_KWARGS,
    },
    "/detokenize": {
        "model": COMMON["model"],
        "tokens": Field(array({"type": "integer", "minimum": 0}), "token ids", [1, 2], required=True),
    },
    "/v1/constraints": {
        "model": COMMON["model"],
        **RESPONSE_FORMAT,
        **CONSTRAINTS,
        "max_tokens": Field({"type": "integer", "minimum": 1}, "token budget of the answer", 16),
        "answer": Field(TEXT, "an answer to validate against the schema", "{}"),
    },
    "/v1/decisions": {
        "model": COMMON["model"],
        "input": Field(_ANY_JSON, "the context: a text, or any JSON", "A scene.", required=True),
        "questions": Field(
            _DECISION_QUESTIONS,
            "`yes_no`, `choice` or `score`, each with an `id`",
            [{"id": "a", "type": "yes_no", "question": "Is it?"}],
            required=True,
        ),
        "images": _IMAGES,
        "temperature": Field(
            {"type": "number", "exclusiveMinimum": 0}, "temperature of the probabilities of answers", 0.5
        ),
        "prompt_format_version": Field({"const": 1}, "1", 1),
        "return_prompt_token_ids": Field({"const": False}, "`false`", False),
        "chat_template_kwargs": _TEMPLATE_OPTIONS,
    },
    "/v1/systemone": {
        "model": COMMON["model"],
        "state": Field(_ANY_JSON, "the context: a text, or any JSON", "A scene.", required=True),
        "questions": Field(
            {"type": "object", "additionalProperties": {"type": "object", "required": ["type"]}},
            "an object that maps ids to questions of type `noul`, `choice` or `score`",
            {"a": {"type": "noul", "instructions": "Is it?"}},
            required=True,
        ),
        "images": _IMAGES,
        "chat_template_kwargs": _TEMPLATE_OPTIONS,
        **{
            name: Field({"type": "null"}, "must be null; supported by `/v1/decisions`")
            for name in ("temperature", "prompt_format_version", "return_prompt_token_ids")
        },
    },
}
