"""The options of ``generate`` and ``stream``: defined, typed and documented once, here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

import PIL.Image

from mmserve.client.outgoing_constraint import ConstraintMode, SchemaOption, Template
from mmserve.core.request import Message, VideoSampling
from mmserve.rpc.policies import Commit, ImageReuse, KvReduction, Pruner, Quality, Recompute

#: An image: the bytes of its file, the file's path, a picture in memory, or the id of an upload.
Image = bytes | Path | PIL.Image.Image | str
#: A video: the bytes of its file, the file's path, or the id of an upload.
Video = bytes | Path | str
#: A chat message: typed, or ``{"role": …, "content": …}``.
Chat = Message | Mapping[str, str]

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """Options of a request beside ``schema``; one that is left out or None has its default.

    model: name of one of the server's models; default the server's first.
    max_new_tokens: tokens that the answer may take, at least 1; default the model's (``describe`` returns it).
    temperature: 0 or more; 0 (default) takes the most probable token.
    top_p: share of the probability that tokens are drawn from, in (0, 1]; default 1.
    top_k: number of most probable tokens that are drawn from; 0 (default) is all.
    min_p: tokens below this share of the highest probability are not drawn, in [0, 1]; default 0.
    repetition_penalty: divides logits of tokens already in the prompt or answer, in [0.01, 100]; default 1 is none.
    seed: 0 to 2**64 - 1; the same seed gives the same answer; default 0.
    n: number of samples of the answer, at least 1; default 1.
    stop: a string, or up to 16 strings; the answer ends before the first that occurs in it; default none.
    steps: denoising steps of a diffusion model for the whole answer, at least 1; default one for each token.
    block_length: tokens of a block of a diffusion model, at least 1; default the model's.
    cfg_scale: scale of classifier-free guidance of a masked diffusion model, in [0, 100]; 0 (default) is none, any
        other makes each pass cost twice as much.
    recompute: recompute policy of a diffusion model, by name or class (``DkvDecode`` …); default the model's.
    commit: commit policy, by name or class (``Threshold`` …); default the model's.
    quality: what both policies are chosen for where neither is named: ``exact`` (plain decoding), ``balanced`` (the
        model's default), ``fast``, or the least share, in (0, 1], of plain decoding's accuracy; default ``balanced``.
    tokens: whether ``Result.tokens`` has the tokens of the answer and their log-probabilities; default False.
    videos: videos placed after the images, before the text of the last message; default none.
    video_sampling: which frames of each of ``videos`` the model sees (``VideoSampling``); default the model's own.
    regex: regular expression (ECMAScript) that the whole answer matches; default none.
    choices: list of strings, one of which is the answer; default none.
    grammar: grammar of the answer, in Lark or GBNF; default none.
    template: list of texts and ``Hole`` between them; ``Result.holes`` has what fills them; default none.
    pruner: method that drops visual tokens, with one of the three amounts below; default none.
    min_pixels: fewest pixels that an image is resized to, for models that take images of any size (Qwen-VL); at most
        the checkpoint's own max_pixels; default the checkpoint's own.
    max_pixels: most pixels that an image is resized to, as min_pixels; default the checkpoint's own.
    video_min_pixels: fewest pixels of a frame of a video (Qwen3-VL: of all frames); default the checkpoint's own.
    video_max_pixels: most pixels of a frame of a video (Qwen3-VL: of all frames); default the checkpoint's own.
    keep_ratio: share of the visual tokens of an image or video that the pruner keeps, in (0, 1]; default none.
    token_budget: number of visual tokens that it keeps, at least 1; default none.
    attention_mass: share of the attention that the kept tokens draw together, in (0, 1]; default none.
    kv_reduction: which keys and values an autoregressive model keeps (``SinkWindow`` …); default all.
    image_reuse: which keys and values of images are reused between prompts (``Blend`` …); default none.
    constraint_mode: what to do with a constraint no grammar can express: "strict" (default) refuses it, "validate"
        checks the finished answer, "lenient" ignores it.
    schema_options: with ``schema``, how it is read: "unknown_formats" have no effect, "one_of_as_any_of",
        "closed_objects" have declared properties only; and how answers are written: with "white_space", with
        "exponents" of numbers, with members in "any_order"; default none.
    constraint_sampling: distribution that constrained answers are drawn from: "mask" (default), "awrs" or "asap".
    """

    model: str | None
    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    n: int | None
    stop: str | Sequence[str]
    steps: int | None
    block_length: int | None
    cfg_scale: float | None
    recompute: Recompute | None
    commit: Commit | None
    quality: Quality | None
    tokens: bool
    videos: Sequence[Video]
    video_sampling: VideoSampling | None
    regex: str | None
    choices: Sequence[str] | None
    grammar: str | None
    template: Template | None
    pruner: Pruner | None
    min_pixels: int | None
    max_pixels: int | None
    video_min_pixels: int | None
    video_max_pixels: int | None
    keep_ratio: float | None
    token_budget: int | None
    attention_mass: float | None
    kv_reduction: KvReduction | None
    image_reuse: ImageReuse | None
    constraint_mode: ConstraintMode | None
    schema_options: Sequence[SchemaOption] | None
    constraint_sampling: Literal["mask", "awrs", "asap"] | None


_ARGUMENTS = """\
prompt: the text of the user's message, or a chat: messages that end with the user's.
images: images placed before the text of the last message: file bytes, ``Path``, PIL image or media id.
schema: JSON schema, or Python type, of the answer; default none.
timeout: seconds until the call fails, above 0; default the client's.
request_id: name of the request in the server's log, 1 to 128 printable ASCII characters; default a new one."""


def documented(method: _Method) -> _Method:
    """Append the documentation of the arguments and options to the docstring of ``method``."""
    parts = (inspect.getdoc(method), _ARGUMENTS, inspect.getdoc(Options))
    method.__doc__ = "\n\n".join(part for part in parts if part)
    return method
