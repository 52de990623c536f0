"""Descriptions of fields that bodies of several APIs have, and parts of their schemas."""

from __future__ import annotations

from typing import Any

from mmserve.http.field_schemas import HINT, LABEL, OBJECT, TEXT, Field, any_of, array, object_of
from mmserve.http.fields import JSON_NAMES, OWN
from mmserve.rpc.violations import MAX_BIASES, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

#: The effect of fields about reasoning.
REASONING = f"{HINT}, as no model here has a separate reasoning phase"
#: Valid values of fields of ``SAMPLING``.
EXAMPLES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "seed": 7,
    "random_seed": 7,
    "n": 2,
    "max_tokens": 4,
    "max_completion_tokens": 4,
    "max_output_tokens": 4,
    "ignore_eos": True,
}
URL = {"type": "string", "description": "a data: URL, an http(s) URL of a host in [media] url_hosts, or a media id"}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
FORMAT = any_of(
    object_of(["type"], type={"enum": ["text", "json_object"]}),
    {"type": "object", "required": ["type"], "properties": {"type": {"const": "json_schema"}}},
)
CONSTRAINTS = {
    "structured_outputs": Field(
        OBJECT, "as in vLLM: `json`, `json_object`, `regex`, `choice` or `grammar`", {"regex": "a"}
    ),
    "guided_json": Field(any_of(TEXT, OBJECT, {"type": "boolean"}), "a JSON schema", {"type": "integer"}),
    "guided_regex": Field(TEXT, "a regular expression", "[ab]"),
    "guided_choice": Field(array(TEXT), "the answer is one of these", ["a", "b"]),
    "guided_grammar": Field(TEXT, "a grammar: GBNF if it contains `::=`, else Lark", 'start: "a"'),
}
RESPONSE_FORMAT = {
    "response_format": Field(
        FORMAT,
        "`text`, `json_object` or `json_schema`; with `strict: false`, what cannot be enforced of the schema is "
        "checked at the end; with tools, it is for answers without calls",
        {"type": "json_object"},
    )
}
COMMON = {
    "model": Field(TEXT, "a name of `GET /v1/models`", "bundled", required=True),
    "stream": Field(
        {"type": "boolean"},
        "stream; deltas are append-only, so text of a diffusion model is sent when all text before it is final",
        True,
    ),
    "mmserve": Field(
        {"type": "object", "properties": {name: {} for name in (*OWN, *JSON_NAMES)}, "additionalProperties": False},
        "policies, pruner, K/V eviction, image reuse, constraint modes: fields of `GenerateRequest` as protobuf JSON, "
        'for example `{"diffusion": {"threshold": {"confidence": 0.8}}}`',
        {"diffusion": {"quality": "QUALITY_EXACT"}},
    ),
    **CONSTRAINTS,
    **RESPONSE_FORMAT,
}
XARGS = {
    "vllm_xargs": Field(
        object_of(
            diffusion_canvas_length={"type": "integer", "minimum": 1},
            diffusion_max_steps={"type": "integer", "minimum": 1},
            diffusion_seed_canvas=array({"type": "integer", "minimum": 0}, minItems=1),
            diffusion_pinned=array({"type": "integer", "minimum": 0}),
        ),
        "vLLM's fields of diffusion models, see below",
        {},
    )
}
TEMPLATE_KWARGS = {
    "chat_template_kwargs": Field(
        OBJECT,
        "variables of the model's chat template, such as `enable_thinking`; unknown ones are refused",
        {},
    )
}
_STOP = {**TEXT, "maxLength": MAX_STOP_CHARACTERS}
STOPS = Field(
    any_of(_STOP, array(_STOP, maxItems=MAX_STOP_STRINGS)),
    f"at most {MAX_STOP_STRINGS} strings of up to {MAX_STOP_CHARACTERS:,} characters; the answer ends before the first "
    "one that occurs",
    ["."],
)
BIAS = Field(
    {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    f"maps token ids to numbers in [-100, 100], which are added to their logits; at most {MAX_BIASES}",
    {"7": -100},
)
CONTINUED = Field(
    {"type": "boolean"},
    "the answer continues the last message, an assistant's text; constraints apply to the answer alone",
    False,
)
METADATA = Field(OBJECT, LABEL, {"a": "b"})
STREAM_OPTIONS = Field(
    object_of(
        **{key: {"type": "boolean"} for key in ("include_usage", "include_obfuscation", "continuous_usage_stats")}
    ),
    "with `stream`: `include_usage` adds a last chunk with the usage; `include_obfuscation` and vLLM's "
    "`continuous_usage_stats` have no effect",
)
TOOL_FIELDS = {
    "tools": Field(array(OBJECT), "functions, see above; the server has no built-in tools", [TOOL]),
    "tool_choice": Field(
        any_of({"enum": ["none", "auto", "required"]}, OBJECT),
        "which tools can be called (`allowed_tools`), or the one to call",
        "none",
    ),
    "parallel_tool_calls": Field({"type": "boolean"}, "whether an answer can have several calls", False),
}
#: The effect of fields that ask for alternatives of tokens.
ALTERNATIVES = "the most probable tokens of each position, at most 20"


def tools_of(tool: Any) -> dict[str, Field]:
    """``TOOL_FIELDS``, with the example ``tool``."""
    return {**TOOL_FIELDS, "tools": Field(array(OBJECT), TOOL_FIELDS["tools"].meaning, [tool])}


def prompt_logprobs(where: str) -> Field:
    """vLLM's ``prompt_logprobs``, which are in ``where``."""
    return Field(
        {"type": "integer", "minimum": 0, "maximum": 20},
        f"vLLM's, for autoregressive models: {where} has `prompt_logprobs`, of each token of the prompt and of this "
        "many most probable tokens of its position, at most 20; null for the first token and for visual tokens; not "
        "with `stream`",
        2,
    )
