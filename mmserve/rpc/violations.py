"""Validation of request messages, field by field."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message as ProtoMessage

from mmserve.config import MediaConfig
from mmserve.core.info import ModelInfo
from mmserve.core.media_id import is_media_id
from mmserve.core.policies import CLASSES
from mmserve.core.request import Diffusion, Sampling, Streaming
from mmserve.core.values import wrong
from mmserve.errors import FieldViolation
from mmserve.rpc.constraint_messages import wrong_constraint
from mmserve.rpc.default_policies import wrong_max_steps, wrong_quality
from mmserve.rpc.tool_messages import LEVELS, is_object, wrong_tools
from mmserve.rpc.vision_messages import wrong_video_sampling, wrong_vision
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire.enums import ROLES
from mmserve.wire.policies import options_of

#: Maximum number of stop strings, and characters of each.
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 1024
#: Maximum number of tokens with logit biases.
MAX_BIASES = 1024
#: Maximum characters of a chat template's options (JSON).
MAX_TEMPLATE_OPTIONS = 1 << 16
#: Maximum total number of messages, their parts and their tool calls.
MAX_PARTS = 1 << 12

#: Violations: field, and what it must be.
Wrong = Iterator[tuple[str, str]]


def violations(message: pb.GenerateRequest, info: ModelInfo, limits: MediaConfig) -> Iterator[FieldViolation]:
    """Yields the violations of ``message`` for the model of ``info`` that can be determined from the message alone."""
    for field, description in (
        *_wrong_messages(message, info, limits),
        *_wrong_sampling(message.sampling, info, prompt_only=message.stream.prompt or message.stream.prompt_tokens),
        *_wrong_stream(message.stream, info),
        *_wrong_diffusion(message.diffusion, info),
        *_wrong_answer(message, info),
        *wrong_constraint(message, info.max_tokens),
        *wrong_tools(message),
        *wrong_vision(message.vision),
        *_wrong_kv(message),
        *_wrong_template_options(message.template_options),
    ):
        yield FieldViolation(field, description)


def _wrong_messages(message: pb.GenerateRequest, info: ModelInfo, limits: MediaConfig) -> Wrong:
    if not message.messages:
        yield "messages", "must hold at least one message"
        return
    # looked at before each of them is: nothing else is served meanwhile
    inner = sum(len(chat.parts) + len(chat.tool_calls) for chat in message.messages)
    if (count := len(message.messages) + inner) > MAX_PARTS:
        yield "messages", f"must hold at most {MAX_PARTS} messages, parts and calls together, not {count}"
        return
    if message.raw:
        kinds = [part.WhichOneof("part") for part in message.messages[0].parts]
        alone = len(message.messages) == 1 and message.messages[0].role == pb.ROLE_USER
        if not alone or (kinds != ["tokens"] and any(kind != "text" for kind in kinds)):
            yield "messages", "must be one message of ROLE_USER, of text alone or of one part of token ids, with raw"
        if message.tools:
            yield "tools", "must be empty with raw: the chat template shows tools"
    images = videos = 0
    for i, chat in enumerate(message.messages):
        if chat.role not in ROLES:
            yield f"messages[{i}].role", "must be ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT or ROLE_TOOL"
        if not chat.parts and not chat.tool_calls:
            yield f"messages[{i}].parts", "must hold at least one part"
        for j, part in enumerate(chat.parts):
            path = f"messages[{i}].parts[{j}]"
            match part.WhichOneof("part"):
                case None:
                    yield path, "must be a text, token ids, an image or a video"
                case "image":
                    images += 1
                    yield from _wrong_media(part.image, f"{path}.image", limits)
                case "video":
                    videos += 1
                    yield from _wrong_media(part.video, f"{path}.video", limits)
                    yield from wrong_video_sampling(part.video.sampling, f"{path}.video.sampling", limits)
                case "tokens" if not message.raw:
                    yield f"{path}.tokens", "must not be set without raw: the chat template takes text"
                case "tokens" if not 0 < len(part.tokens.ids) <= info.max_tokens:
                    yield f"{path}.tokens.ids", f"must hold 1 to {info.max_tokens} ids, not {len(part.tokens.ids)}"
    yield from _wrong_end(message)
    allowed = min(limits.max_images, info.max_images) if info.images else limits.max_images
    if images > allowed:
        yield "messages", f"must hold at most {allowed} images, not {images}"
    allowed = min(limits.max_videos, info.max_videos) if info.videos else limits.max_videos
    if videos > allowed:
        yield "messages", f"must hold at most {allowed} videos, not {videos}"


def _wrong_end(message: pb.GenerateRequest) -> Wrong:
    """Yields the violations of the last message, after which the answer begins."""
    last, path = message.messages[-1], f"messages[{len(message.messages) - 1}]"
    if not message.continue_final_message:
        if last.tool_calls:
            yield f"{path}.tool_calls", "must be followed by the results of the calls"
    elif message.raw:
        yield "continue_final_message", "must be false with raw, whose answer continues the text"
    elif last.role != pb.ROLE_ASSISTANT:
        yield "continue_final_message", "must be false unless the last message is ROLE_ASSISTANT"
    elif last.tool_calls or any(part.WhichOneof("part") != "text" for part in last.parts):
        yield f"{path}.parts", "must be of text alone: the answer continues it"


def _wrong_media(item: pb.Image | pb.Video, path: str, limits: MediaConfig) -> Wrong:
    source = item.WhichOneof("source")
    size = len(item.data) if source == "data" else 0  # once, because each access copies the data
    match source:
        case None:
            yield path, "must have data, a media_id or a url"
        case "data" if not size:
            yield f"{path}.data", "must not be empty"
        case "data" if size > limits.max_item_bytes:
            yield f"{path}.data", f"must be at most {limits.max_item_bytes} bytes, not {size}"
        case "media_id" if not is_media_id(item.media_id):
            yield f"{path}.media_id", "must be 'sha256:' and 64 lower-case hexadecimal digits"


def _wrong_sampling(sampling: pb.SamplingParams, info: ModelInfo, *, prompt_only: bool) -> Wrong:
    """Yields the violations of ``sampling``; ``prompt_only``: whether the answer may have no tokens."""
    for name, rule in wrong(Sampling, options_of(sampling)):
        if name != "max_new_tokens" or sampling.max_new_tokens or not prompt_only:
            yield f"sampling.{name}", rule
    if sampling.max_new_tokens > info.max_tokens:
        yield "sampling.max_new_tokens", f"must be in [1, {info.max_tokens}], not {sampling.max_new_tokens}"
    if len(sampling.logit_bias) > MAX_BIASES:
        yield "sampling.logit_bias", f"must hold at most {MAX_BIASES} tokens, not {len(sampling.logit_bias)}"
    elif not all(-100 <= bias <= 100 for bias in sampling.logit_bias.values()):
        yield "sampling.logit_bias", "must be in [-100, 100]"
    if len(sampling.stop) > MAX_STOP_STRINGS:
        yield "sampling.stop", f"must hold at most {MAX_STOP_STRINGS} strings, not {len(sampling.stop)}"
    for i, stop in enumerate(sampling.stop[: MAX_STOP_STRINGS + 1]):
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            what = f"have at most {MAX_STOP_CHARACTERS} characters, not {len(stop)}" if stop else "not be empty"
            yield f"sampling.stop[{i}]", f"must {what}"


def _wrong_stream(stream: pb.StreamOptions, info: ModelInfo) -> Wrong:
    for name, rule in wrong(Streaming, options_of(stream)):
        yield f"stream.{name}", rule
    if stream.alternatives and not (stream.tokens or stream.drafts):
        yield "stream.alternatives", "must be 0 without tokens and drafts, which it is for"
    if stream.prompt_alternatives and not stream.prompt_tokens:
        yield "stream.prompt_alternatives", "must be 0 without prompt_tokens, which it is for"
    if stream.prompt_tokens and info.diffusion:
        why = "a diffusion model does not predict a token from those before it"
        yield "stream.prompt_tokens", f"log-probabilities of a prompt are only for autoregressive models: {why}"


def _wrong_diffusion(diffusion: pb.DiffusionParams, info: ModelInfo) -> Wrong:
    for name, rule in wrong(Diffusion, options_of(diffusion)):
        yield f"diffusion.{name}", rule
    if diffusion.block_length > 1 and not info.diffusion:
        yield "diffusion.block_length", "must be 1: the model decodes one token after another"
    yield from wrong_quality(diffusion)
    yield from wrong_max_steps(diffusion, info)
    for name in ("tokens", "pinned"):
        if (count := len(getattr(diffusion.seed_canvas, name))) > info.max_tokens:
            yield f"diffusion.seed_canvas.{name}", f"must hold at most {info.max_tokens}, not {count}"
    for kind in ("recompute", "commit"):
        yield from wrong_policy(diffusion, kind, "diffusion")


def wrong_policy(message: ProtoMessage, oneof: str, path: str) -> Wrong:
    """Yields the violations of the parameters of the policy chosen in ``oneof``, and of its base policy."""
    chosen = message.WhichOneof(oneof)
    if chosen is None:
        return
    policy = getattr(message, chosen)
    for name, rule in wrong(CLASSES.get(chosen), options_of(policy)):
        yield f"{path}.{chosen}.{name}", rule
    if "base" in policy.DESCRIPTOR.oneofs_by_name:
        yield from wrong_policy(policy, "base", f"{path}.{chosen}")


def _wrong_answer(message: pb.GenerateRequest, info: ModelInfo) -> Wrong:
    """Yields violations of the answer region of ``early_commit``: not part of the canvas, or specified twice."""
    early = message.diffusion.early_commit
    if early.answer_after and early.answer_start:
        yield "diffusion.early_commit.answer_start", "must be 0 with answer_after: the answer begins after that text"
    if not early.answer_length:
        return
    canvas = message.sampling.max_new_tokens if message.sampling.HasField("max_new_tokens") else info.max_new_tokens
    if early.answer_start + early.answer_length > canvas:
        yield "diffusion.early_commit.answer_length", f"must end within the {canvas} tokens of the canvas"


def _wrong_template_options(text: str) -> Wrong:
    if not text:
        return
    if len(text) > MAX_TEMPLATE_OPTIONS:
        yield "template_options", f"must be at most {MAX_TEMPLATE_OPTIONS} characters, not {len(text)}"
        return
    if not is_object(text):
        yield "template_options", f"must be the JSON text of an object{LEVELS}"


def _wrong_kv(message: pb.GenerateRequest) -> Wrong:
    for name in ("kv_reduction", "image_reuse"):
        asked = getattr(message, name)
        if message.HasField(name) and asked.WhichOneof("policy") is None:
            yield name, "must have a policy"
        yield from wrong_policy(asked, "policy", name)
