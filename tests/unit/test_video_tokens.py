"""Clips to visual tokens: pooling against plain loops, separators, and the rows of a prompt with text and images."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from clips import clip, decode_video, frame_tokens, video_model
from helpers import ask, picture
from PIL import Image
from torch import Tensor

from mmserve.config import MediaConfig
from mmserve.core.encoded import Encoded
from mmserve.core.request import ImagePart, Message, Part, Request, TextPart, VideoPart
from mmserve.encode.encoder import Encoder
from mmserve.errors import FailedPrecondition, InvalidArgument
from mmserve.models.base import LoadedModel
from mmserve.models.projectors import NewlineProjector, pool_grid, pooled_side
from mmserve.models.vision import LlavaVision, VideoSettings

FILE = clip(frames=40, gop=30)


def by_loops(tokens: Tensor, stride: int, mode: str) -> Tensor:
    """The definition, one output token at a time; ``bilinear`` reads at the centre of each of its squares."""
    frames, count, width = tokens.shape
    side = math.isqrt(count)
    rows = math.ceil(side / stride) if mode == "bilinear" else side // stride
    pooled = torch.zeros(frames, rows, rows, width)
    for f in range(frames):
        for y in range(rows):
            for x in range(rows):
                if mode == "bilinear":
                    pooled[f, y, x] = _between(tokens[f], side, (y + 0.5) * side / rows, (x + 0.5) * side / rows)
                    continue
                square = torch.stack(
                    [tokens[f, (y * stride + i) * side + x * stride + j] for i in range(stride) for j in range(stride)]
                )
                pooled[f, y, x] = square.mean(0) if mode == "average" else square.amax(0)
    return pooled


def _between(tokens: Tensor, side: int, y: float, x: float) -> Tensor:
    """The value at a point of a grid whose patches have their centres at 0.5, 1.5, …; outside, the nearest's."""
    y, x = max(y - 0.5, 0.0), max(x - 0.5, 0.0)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, side - 1), min(left + 1, side - 1)
    down, across = y - top, x - left
    above = tokens[top * side + left] * (1 - across) + tokens[top * side + right] * across
    below = tokens[bottom * side + left] * (1 - across) + tokens[bottom * side + right] * across
    return above * (1 - down) + below * down


@pytest.mark.parametrize("mode", ["average", "max", "bilinear"])
@pytest.mark.parametrize(("side", "stride"), [(9, 3), (8, 2), (7, 2), (5, 3), (4, 4), (3, 1)])
def test_pooling_is_a_plain_loop(side: int, stride: int, mode: str) -> None:
    tokens = torch.randn(3, side * side, 5, generator=torch.Generator().manual_seed(side))
    pooled, expected = pool_grid(tokens, stride, mode), by_loops(tokens, stride, mode)
    assert pooled.shape == expected.shape and pooled.shape[1] == pooled_side(side, stride, mode)
    assert (pooled - expected).abs().max() < 1e-6


def test_81_patches_pooled_by_three_are_9() -> None:
    assert pool_grid(torch.zeros(8, 81, 4), 3, "average").flatten(1, 2).shape == (8, 9, 4)


def vision_of(model: LoadedModel) -> LlavaVision:
    assert isinstance(model.vision, LlavaVision)
    return model.vision


def test_pooling_comes_behind_the_projector() -> None:
    vision = vision_of(video_model(stride=2, mode="max"))
    pixels = torch.randn(3, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens, projected = frame_tokens(vision, pixels), vision(pixels)
    assert [t.shape for t in tokens] == [(1, 64)] * 3
    assert torch.equal(torch.stack(tokens)[:, 0], projected.amax(1))


@pytest.mark.parametrize(
    ("position", "counts"),
    [("no_token", [4, 4, 4]), ("one_token", [4, 4, 5]), ("frame", [5, 5, 5]), ("grid", [6, 6, 6])],
)
def test_separators(position: str, counts: list[int]) -> None:
    """Where LLaVA-NeXT's ``add_token_per_frame`` and ``add_token_per_grid`` put ``image_newline``."""
    vision = vision_of(video_model(stride=1))
    newline = torch.full((64,), 7.0)
    pixels = torch.randn(3, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = frame_tokens(vision, pixels)
        vision.projector = NewlineProjector(vision.projector, newline)
        vision.video = VideoSettings(frames=3, stride=1, mode="average", newline=position)
        tokens = frame_tokens(vision, pixels)
        assert vision(pixels).shape == (3, 5, 64)  # images keep theirs
    assert [len(t) for t in tokens] == counts
    for frame, (with_newline, without) in enumerate(zip(tokens, plain, strict=True)):
        ends = (with_newline == newline).all(1)
        assert torch.equal(with_newline[~ends], without)
        expected = {"no_token": [], "one_token": [4] if frame == 2 else [], "frame": [4], "grid": [2, 5]}[position]
        assert ends.nonzero().flatten().tolist() == expected


def encoded(model: LoadedModel, *parts: Part, before: tuple[Message, ...] = ()) -> Encoded:
    (found,) = encoder(model).encode([request_of(*parts, before=before)])
    return found


def encoder(model: LoadedModel, **limits: float) -> Encoder:
    return Encoder(model, MediaConfig(**limits), max_tokens=400)


def request_of(*parts: Part, before: tuple[Message, ...] = ()) -> Request:
    return replace(ask("a"), messages=(*before, Message("user", parts)))


def ids_of(model: LoadedModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special_tokens=False)


def image_tokens(model: LoadedModel, file: bytes) -> Tensor:
    vision = vision_of(model)
    with torch.inference_mode():
        return vision(vision.prepare(Image.open(io.BytesIO(file)).convert("RGB"))["pixels"])[0]


def clip_tokens(model: LoadedModel, file: bytes) -> list[Tensor]:
    vision = vision_of(model)
    frames = decode_video(file, MediaConfig(), frames=vision.frames_per_video).frames
    with torch.inference_mode():
        return frame_tokens(vision, torch.cat([vision.prepare(frame)["pixels"] for frame in frames]))


@pytest.mark.parametrize("time", ["", "{seconds}s:", "at {seconds} s "])
def test_rows_of_a_clip(time: str) -> None:
    model = video_model(stride=1, time=time)
    found = encoded(model, VideoPart(FILE), TextPart("when?"))
    head = ids_of(model, "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\n")
    tail = ids_of(model, "\nwhen?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
    rows: list[int] = []
    visual: list[int] = []
    for seconds in (0, 1, 2, 3):  # the frames are those of 0.5, 1.5, 2.5 and 3.5 s
        rows += ids_of(model, time.format(seconds=seconds))
        visual += range(len(head) + len(rows), len(head) + len(rows) + 4)
        rows += [model.spec.video_id] * 4
    assert found.ids.tolist() == head + rows + tail
    assert found.image_rows.tolist() == visual
    assert found.features is not None and torch.equal(found.features, torch.cat(clip_tokens(model, FILE)))


def test_order_of_text_images_and_videos() -> None:
    model = video_model(stride=2, time="{seconds}s:")
    other = clip(frames=3)
    earlier = Message("user", (VideoPart(other), TextPart("first")))
    reply = Message("assistant", (TextPart("yes"),))
    parts = (TextPart("a"), ImagePart(picture(1)), TextPart("b"), VideoPart(FILE), ImagePart(picture(2)))
    found = encoded(model, *parts, before=(earlier, reply))
    assert found.features is not None
    images = [image_tokens(model, picture(seed)) for seed in (1, 2)]
    expected = torch.cat([*clip_tokens(model, other), images[0], *clip_tokens(model, FILE), images[1]])
    assert torch.allclose(found.features, expected, atol=1e-6)
    image, video = model.spec.image_id, model.spec.video_id
    kinds = found.ids[found.image_rows].tolist()
    assert kinds == [video] * 3 + [image] * 4 + [video] * 4 + [image] * 4
    assert np.isin(found.ids, [image, video]).sum() == len(kinds)
    text = model.tokenizer.decode(np.delete(found.ids, found.image_rows))
    assert "0s:0s:0s:\nfirst" in text and "a\nb0s:1s:2s:3s:\n" in text


def test_a_clip_of_fewer_frames_has_fewer_rows() -> None:
    found = encoded(video_model(stride=1), VideoPart(clip(frames=2)), TextPart("x"))
    assert len(found.image_rows) == 2 * 4


def test_a_clips_tokens_do_not_depend_on_the_batch() -> None:
    model = video_model(stride=1)
    others = [request_of(VideoPart(clip(frames=3)), TextPart("y")), request_of(ImagePart(picture(0)), TextPart("z"))]
    alone = encoded(model, VideoPart(FILE), TextPart("x"))
    together = encoder(model).encode([others[0], request_of(VideoPart(FILE), TextPart("x")), others[1]])[1]
    assert alone.features is not None and together.features is not None
    assert np.array_equal(alone.ids, together.ids) and torch.equal(alone.features, together.features)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((TextPart("what is <video> here?"),), "what is <video> here?"),
        ((VideoPart(FILE), TextPart("<video><video>")), "<video><video>"),
        ((TextPart("<vid"), TextPart("eo>")), "<video>"),
        ((VideoPart(FILE), TextPart("<image>")), "<image>"),
    ],
)
def test_placeholders_in_the_text_are_text(parts: tuple[Part, ...], text: str) -> None:
    model = video_model()
    found = encoded(model, *parts)
    left = np.delete(found.ids, found.image_rows)
    assert not np.isin(left, [model.spec.image_id, model.spec.video_id]).any()
    assert text in model.tokenizer.decode(left)


def test_models_without_videos(model: LoadedModel, text_model: LoadedModel) -> None:
    for without in (model, text_model):
        with pytest.raises(FailedPrecondition, match="takes no videos"):
            encoded(without, VideoPart(FILE), TextPart("x"))
        found = encoded(without, TextPart("a literal <video> is text to it"))
        assert "<video>" in without.tokenizer.decode(found.ids)


def test_errors_name_the_part() -> None:
    with pytest.raises(InvalidArgument) as raised:
        encoded(video_model(), TextPart("x"), VideoPart(FILE[:-9]), before=(Message("user", (TextPart("y"),)),))
    assert raised.value.violations[0].field == "messages[1].parts[1].video"
    with pytest.raises(InvalidArgument, match="the limit is 2"):
        encoder(video_model(), max_video_seconds=2.0).encode([request_of(VideoPart(FILE), TextPart("x"))])


def test_too_long_a_prompt() -> None:
    model = video_model(frames=40, stride=1, time="{seconds} seconds after the beginning:")
    with pytest.raises(InvalidArgument, match="exceed the limit of 400") as raised:
        encoded(model, VideoPart(FILE), TextPart("x"))
    assert raised.value.violations[0].field == "messages"
