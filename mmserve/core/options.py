"""The options of a request as its caller names them: all together, and those that ``core.request`` has otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.core.request import Diffusion, Sampling, Streaming
from mmserve.core.session import FrameSampling, Memory
from mmserve.core.values import SHARE_ABOVE_0, Range, Value, at_least, value, values

_PIXELS = Range("from 1 to 2**63 - 1", lambda pixels: 1 <= pixels < 1 << 63)


@dataclass(frozen=True)
class Amounts:
    """How much a pruner keeps of each image, and of each video; at most one of them is set."""

    keep_ratio: float | None = value(
        None, SHARE_ABOVE_0, "share of the visual tokens of an image or video that the pruner keeps", shown="none"
    )
    token_budget: int | None = value(None, at_least(1), "number of visual tokens that it keeps", shown="none")
    attention_mass: float | None = value(
        None, SHARE_ABOVE_0, "share of the attention that the kept tokens draw together", shown="none"
    )


@dataclass(frozen=True)
class Pixels:
    """Fewest and most pixels that pictures are resized to, for models that take images of any size (Qwen-VL)."""

    min_pixels: int | None = value(
        None, _PIXELS, "fewest pixels that an image is resized to", shown="the checkpoint's own"
    )
    max_pixels: int | None = value(
        None, _PIXELS, "most pixels that an image is resized to", shown="the checkpoint's own"
    )
    video_min_pixels: int | None = value(
        None,
        _PIXELS,
        "fewest pixels of a frame of a video (Qwen3-VL: of all frames)",
        shown="the checkpoint's own",
    )
    video_max_pixels: int | None = value(
        None,
        _PIXELS,
        "most pixels of a frame of a video (Qwen3-VL: of all frames)",
        shown="the checkpoint's own",
    )


@dataclass(frozen=True)
class _Chosen:
    """Options that are names, files, texts or classes with numbers of their own."""

    model: str = value(None, meaning="name of one of the server's models", shown="the server's first")
    videos: tuple[object, ...] = value(
        (), meaning="videos placed after the images, before the text of the last message", shown="none"
    )
    video_sampling: object = value(
        None, meaning="which frames of each video the model sees (``VideoSampling``)", shown="the model's own"
    )
    recompute: object = value(
        None, meaning="recompute policy of a diffusion model, by name or class (``DkvDecode`` …)", shown="the model's"
    )
    commit: object = value(None, meaning="commit policy, by name or class (``Threshold`` …)", shown="the model's")
    quality: object = value(
        None,
        meaning="what both policies are chosen for where neither is named: exact (plain decoding), balanced (the "
        "model's default), fast, or the least share, in (0, 1], of plain decoding's accuracy",
        shown="balanced",
    )
    seed_canvas: object = value(
        None,
        meaning="tokens that a diffusion model's canvas begins with, and those of them that stay (``SeedCanvas``)",
        shown="none",
    )
    tokens: bool = value(
        False, meaning="whether the result has the tokens of the answer and their log-probabilities", shown="False"
    )
    alternatives: int = value(
        None,
        values(Streaming)["alternatives"].range,
        "most probable tokens with each of ``tokens`` and drafts",
        shown="0",
    )
    regex: str = value(None, meaning="regular expression (ECMAScript) that the whole answer matches", shown="none")
    choices: tuple[str, ...] = value(None, meaning="texts, one of which is the answer", shown="none")
    grammar: str = value(None, meaning="grammar of the answer, in Lark or GBNF", shown="none")
    template: object = value(None, meaning="texts and holes between them, which the answer fills", shown="none")
    constraint_mode: str = value(
        None,
        meaning="what to do with a constraint that no grammar can express: strict refuses it, validate checks the "
        "finished answer, lenient ignores it",
        shown="strict",
    )
    schema_options: tuple[str, ...] = value(
        None,
        meaning="with a schema, how it is read: unknown_formats have no effect, one_of_as_any_of, closed_objects have "
        "declared properties only; and how answers are written: with white_space, with exponents of numbers, with "
        "members in any_order",
        shown="none",
    )
    constraint_sampling: str = value(
        None,
        meaning="distribution that constrained answers are drawn from: mask, or true to the model and weighted: awrs, "
        "asap",
        shown="mask",
    )
    adapter: str = value(
        None, meaning="adapter (LoRA) of the model, one that the server has loaded (``Client.adapters``)", shown="none"
    )
    raw: bool = value(
        False,
        meaning="whether the answer continues the prompt, a text, without the model's chat template",
        shown="False",
    )
    template_options: object = value(
        None,
        meaning="further variables of the model's chat template, such as ``enable_thinking``, by name",
        shown="none",
    )
    slo_class: str = value(
        None, meaning="class of the server's configuration that sets how soon tokens are due", shown="none"
    )
    tools: tuple[object, ...] = value(
        None,
        meaning="tools that the answer may call, with arguments that obey their schemas: functions, Python types, "
        "``Tool(…)`` or mappings",
        shown="none",
    )
    tool_choice: str = value(
        None, meaning="auto (text or calls), none, required, or the name of the tool to call", shown="auto"
    )
    parallel_tool_calls: bool = value(None, meaning="whether an answer may have several calls", shown="True")
    pruner: str = value(None, meaning="method that drops visual tokens, which needs an amount", shown="none")
    kv_reduction: object = value(
        None, meaning="which K/V an autoregressive model keeps while it decodes (``SinkWindow`` …)", shown="all"
    )
    image_reuse: object = value(
        None, meaning="which K/V of images are reused between prompts (``Blend`` …)", shown="none"
    )
    overload: str = value(
        "block", meaning="frames that come too fast: pushes wait (block), drop_oldest, or thin: every second is dropped"
    )


_CHOSEN = values(_Chosen)
#: Options that are a message's fields of the same name: ``SamplingParams``, ``DiffusionParams``, ``VisionParams``.
SAMPLING, DIFFUSION, AMOUNTS, PIXELS = values(Sampling), values(Diffusion), values(Amounts), values(Pixels)

#: Every option of a request, and of a session of streaming video, by name.
REQUEST: dict[str, Value] = {**_CHOSEN, **SAMPLING, **DIFFUSION, **AMOUNTS, **PIXELS}
SESSION: dict[str, Value] = {**REQUEST, **values(Memory), **values(FrameSampling), "memory": values(Memory)["policy"]}
