"""The options of a request by their public names, which can differ from those in ``core.request``."""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.core.request import Diffusion, Sampling, Streaming
from mmserve.core.session import FrameSampling, Memory
from mmserve.core.values import SHARE_ABOVE_0, Range, Value, at_least, value, values

_PIXELS = Range("from 1 to 2**63 - 1", lambda pixels: 1 <= pixels < 1 << 63)


@dataclass(frozen=True)
class Amounts:
    """The amount that a pruner keeps of each image and each video; at most one of these is set."""

    keep_ratio: float | None = value(
        None, SHARE_ABOVE_0, "share of the visual tokens of an image or video that the pruner keeps", shown="none"
    )
    token_budget: int | None = value(None, at_least(1), "number of visual tokens that the pruner keeps", shown="none")
    attention_mass: float | None = value(
        None, SHARE_ABOVE_0, "share of the attention that the kept tokens receive together", shown="none"
    )


@dataclass(frozen=True)
class Pixels:
    """Smallest and largest number of pixels that images are resized to, for models with any image size (Qwen-VL)."""

    min_pixels: int | None = value(
        None, _PIXELS, "smallest number of pixels that an image is resized to", shown="the checkpoint's"
    )
    max_pixels: int | None = value(
        None, _PIXELS, "largest number of pixels that an image is resized to", shown="the checkpoint's"
    )
    video_min_pixels: int | None = value(
        None,
        _PIXELS,
        "smallest number of pixels of a frame of a video (Qwen3-VL: of all frames)",
        shown="the checkpoint's",
    )
    video_max_pixels: int | None = value(
        None,
        _PIXELS,
        "largest number of pixels of a frame of a video (Qwen3-VL: of all frames)",
        shown="the checkpoint's",
    )


@dataclass(frozen=True)
class _Chosen:
    """Options that are names, files, texts, or policy classes with parameters."""

    model: str = value(None, meaning="name of one of the server's models", shown="the server's first")
    videos: tuple[object, ...] = value(
        (), meaning="videos placed after the images, before the text of the last message", shown="none"
    )
    video_sampling: object = value(
        None, meaning="which frames of each video the model sees (``VideoSampling``)", shown="the model's"
    )
    recompute: object = value(
        None, meaning="recompute policy of a diffusion model, by name or class (``DkvDecode`` …)", shown="the model's"
    )
    commit: object = value(None, meaning="commit policy, by name or class (``Threshold`` …)", shown="the model's")
    quality: object = value(
        None,
        meaning="how both policies are chosen where neither is named: exact (plain decoding), balanced (the model's "
        "default), fast, or the lowest accuracy relative to plain decoding, in (0, 1]",
        shown="balanced",
    )
    seed_canvas: object = value(
        None,
        meaning="initial tokens of a diffusion model's canvas, and which of them are pinned (``SeedCanvas``)",
        shown="none",
    )
    tokens: bool = value(False, meaning="return the tokens of the answer with their log-probabilities")
    alternatives: int = value(
        None,
        values(Streaming)["alternatives"].range,
        "number of most probable tokens returned with each of ``tokens`` and drafts",
        shown="0",
    )
    return_prompt: bool = value(
        False, meaning="return the prompt's token ids and text, as ``Result.prompt`` or the event ``Prefilled``"
    )
    prompt_tokens: bool = value(
        False,
        meaning="return in the same way the prompt's tokens with their log-probabilities (autoregressive models); with "
        "this or ``return_prompt``, ``max_new_tokens`` may be 0",
    )
    prompt_alternatives: int = value(
        None,
        values(Streaming)["prompt_alternatives"].range,
        "number of most probable tokens returned with each of ``prompt_tokens``",
        shown="0",
    )
    regex: str = value(None, meaning="regular expression (ECMAScript) that the whole answer must match", shown="none")
    choices: tuple[str, ...] = value(None, meaning="texts, one of which is the answer", shown="none")
    grammar: str = value(None, meaning="context-free grammar of the answer, in Lark or GBNF", shown="none")
    template: object = value(None, meaning="fixed texts with holes between them, which the answer fills", shown="none")
    constraint_mode: str = value(
        None,
        meaning="what to do with the part of a constraint that no grammar can express: strict refuses the request, "
        "validate checks the finished answer, lenient ignores that part",
        shown="strict",
    )
    schema_options: tuple[str, ...] = value(
        None,
        meaning="how a schema is read: unknown_formats (ignored), one_of_as_any_of, closed_objects (declared "
        "properties only); and what answers may contain: white_space, exponents in numbers, members in any_order",
        shown="none",
    )
    constraint_sampling: str = value(
        None,
        meaning="how constrained answers are sampled: mask (forbidden tokens are masked), or awrs or asap, which "
        "follow the model's distribution",
        shown="mask",
    )
    adapter: str = value(
        None, meaning="adapter (LoRA) of the model that the server has loaded (``Client.adapters``)", shown="none"
    )
    raw: bool = value(
        False,
        meaning="continue the text or token ids (`TokensPart`) of the prompt, without the model's chat template",
    )
    continue_final_message: bool = value(
        False, meaning="continue the last message of the chat, which must be the assistant's"
    )
    template_options: object = value(
        None,
        meaning="variables of the model's chat template by name, such as ``enable_thinking``",
        shown="none",
    )
    slo_class: str = value(
        None, meaning="service class ([slo.NAME] in the server's configuration) with latency targets", shown="none"
    )
    tools: tuple[object, ...] = value(
        None,
        meaning="tools that the answer can call, with arguments valid under their schemas: functions, Python types, "
        "``Tool(…)`` or mappings",
        shown="none",
    )
    tool_choice: str = value(
        None, meaning="auto (text or calls), none, required, or the name of the tool to call", shown="auto"
    )
    allowed_tools: tuple[str, ...] = value(
        None, meaning="names of the tools that can be called; the model is shown all of ``tools``", shown="all"
    )
    parallel_tool_calls: bool = value(None, meaning="allow several calls in one answer", shown="true")
    pruner: str = value(
        None, meaning="method that drops visual tokens; needs keep_ratio, token_budget or attention_mass", shown="none"
    )
    kv_reduction: object = value(
        None, meaning="K/V eviction of an autoregressive model while it decodes (``SinkWindow`` …)", shown="none"
    )
    image_reuse: object = value(
        None, meaning="reuse of images' K/V between prompts, an approximation (``Blend`` …)", shown="none"
    )
    overload: str = value(
        "block", meaning="when frames arrive too fast: block (pushes wait), drop_oldest, thin (drop every second one)"
    )


_CHOSEN = values(_Chosen)
#: Options whose names equal fields of messages: ``SamplingParams``, ``DiffusionParams``, ``VisionParams``.
SAMPLING, DIFFUSION, AMOUNTS, PIXELS = values(Sampling), values(Diffusion), values(Amounts), values(Pixels)

#: Every option of a request, and of a video session, by name.
REQUEST: dict[str, Value] = {**_CHOSEN, **SAMPLING, **DIFFUSION, **AMOUNTS, **PIXELS}
SESSION: dict[str, Value] = {**REQUEST, **values(Memory), **values(FrameSampling), "memory": values(Memory)["policy"]}
