"""The options of ``generate`` and ``stream``, typed; ``core.options`` has their ranges, defaults and meanings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

import PIL.Image

from mmserve.client.outgoing_constraint import ConstraintMode, SchemaOption, Template
from mmserve.client.tools import ToolLike
from mmserve.core.options import REQUEST
from mmserve.core.policies.commit import Commit
from mmserve.core.policies.image_reuse import ImageReuse
from mmserve.core.policies.kv_reduction import KvReduction
from mmserve.core.policies.pruner import Pruner
from mmserve.core.policies.recompute import Recompute
from mmserve.core.request import Message, SeedCanvas, VideoSampling
from mmserve.core.tuning import Quality
from mmserve.core.values import Value

#: An image: the bytes of its file, the file's path, a PIL image, the id of an upload, or a URL that the server
#: downloads.
Image = bytes | Path | PIL.Image.Image | str
#: A video: the bytes of its file, the file's path, the id of an upload, or a URL.
Video = bytes | Path | str
#: A chat message: typed, or ``{"role": …, "content": …}``; an assistant's may have ``tool_calls``, and a tool's has the
#: ``tool_call_id`` that it answers.
Chat = Message | Mapping[str, Any]

_Method = TypeVar("_Method", bound=Callable[..., Any])


class SharedOptions(TypedDict, total=False):
    """Options of a request, and of a session for the questions that do not set them."""

    model: str | None
    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str]
    steps: int | None
    block_length: int | None
    recompute: Recompute | None
    commit: Commit | None
    quality: Quality | None
    pruner: Pruner | None
    keep_ratio: float | None
    token_budget: int | None
    attention_mass: float | None


class Options(SharedOptions, total=False):
    """Options of a request besides ``schema``; omitted ones and None have their defaults."""

    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    ignore_end: bool
    n: int | None
    cfg_scale: float | None
    max_steps: int | None
    seed_canvas: SeedCanvas | None
    tokens: bool
    alternatives: int | None
    return_prompt: bool
    prompt_tokens: bool
    prompt_alternatives: int | None
    videos: Sequence[Video]
    video_sampling: VideoSampling | None
    regex: str | None
    choices: Sequence[str] | None
    grammar: str | None
    template: Template | None
    min_pixels: int | None
    max_pixels: int | None
    video_min_pixels: int | None
    video_max_pixels: int | None
    kv_reduction: KvReduction | None
    image_reuse: ImageReuse | None
    constraint_mode: ConstraintMode | None
    schema_options: Sequence[SchemaOption] | None
    constraint_sampling: Literal["mask", "awrs", "asap"] | None
    adapter: str | None
    raw: bool
    continue_final_message: bool
    template_options: Mapping[str, Any] | None
    slo_class: str | None
    tools: Sequence[ToolLike] | None
    tool_choice: str | None
    allowed_tools: Sequence[str] | None
    parallel_tool_calls: bool | None


#: Arguments of ``generate`` and ``stream`` besides their options.
ARGUMENTS = """\
prompt: the text of the user's message, or a chat: messages that end with the user's.
images: images placed before the text of the last message: file bytes, ``Path``, PIL image or media id.
schema: JSON schema, or Python type, of the answer; default none.
timeout: seconds until the call fails, above 0; default the client's.
request_id: name of the request in the server's log, 1 to 128 printable ASCII characters; default a new one."""


def describe(options: type[Any], known: Mapping[str, Value]) -> None:
    """Append a line for each key of the typed dictionary ``options`` to its docstring."""
    lines = [f"{name}: {known[name].sentence}." for name in options.__annotations__]
    options.__doc__ = "\n\n".join([inspect.getdoc(options) or "", "\n".join(lines)])


describe(Options, REQUEST)


def documented(options: type[Any], arguments: str = "") -> Callable[[_Method], _Method]:
    """Append the documentation of a method's ``arguments`` and of its ``options`` to its docstring."""

    def document(method: _Method) -> _Method:
        parts = (inspect.getdoc(method), arguments, inspect.getdoc(options))
        method.__doc__ = "\n\n".join(part for part in parts if part)
        return method

    return document
