"""Whatever a shared cache was asked before, a request gets the tokens of its own picture, seen its own way."""

from __future__ import annotations

import copy
import dataclasses
import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from clips import clip, video_model
from helpers import ask, picture
from PIL import Image
from tokenizers import normalizers

from mmserve.config import EncoderCacheConfig, MediaConfig
from mmserve.core.encoded import Encoded
from mmserve.core.request import Amount, ImagePart, Message, Part, Request, TextPart, VideoPart, Vision
from mmserve.encode.encoder import Encoder
from mmserve.errors import InvalidArgument
from mmserve.models.base import LoadedModel
from mmserve.tiers.caches import Caches

#: A model, its limits and a request: all that an entry may depend on.
Case = tuple[LoadedModel, MediaConfig, Request]


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(PLAIN, exif=exif)


def one_pixel_differs() -> bytes:
    pixels = np.array(PLAIN)
    pixels[17, 23, 1] ^= 1
    return saved(Image.fromarray(pixels))


BASE = picture(0)
PLAIN = Image.open(io.BytesIO(BASE)).convert("RGB")
#: Files of the same pixels as ``BASE``, and of others.
SAME = {
    "stored": saved(PLAIN, compress_level=0),
    "BMP": saved(PLAIN, "BMP"),
    "WebP": saved(PLAIN, "WEBP", lossless=True),
    "junk behind": BASE + b"junk",
    "upright": turned(1),
}
OTHERS = {
    "another": picture(1),
    "one bit": one_pixel_differs(),
    "upside down": turned(3),
    "lying": turned(6),
    "mirrored": turned(2),
    "larger": saved(PLAIN.resize((400, 300))),
}
PRUNED = {
    "a quarter": Vision(pruner="cls_attention", amount=Amount("keep_ratio", 0.25)),
    "a half": Vision(pruner="cls_attention", amount=Amount("keep_ratio", 0.5)),
    "two tokens": Vision(pruner="cls_attention", amount=Amount("token_budget", 2)),
    "as much attention": Vision(pruner="cls_attention", amount=Amount("attention_mass", 0.5)),
    "merged": Vision(pruner="tome", amount=Amount("keep_ratio", 0.5)),
    "drawn": Vision(pruner="random", amount=Amount("keep_ratio", 0.5)),
}


def of(data: bytes, vision: Vision | None = None, **sampling: Any) -> Request:
    return dataclasses.replace(ask("r", images=(data,), **sampling), vision=vision or Vision())


def showing(*parts: Part) -> Request:
    return dataclasses.replace(ask("r"), messages=(Message("user", (*parts, TextPart("?"))),))


def changed(model: LoadedModel, change: Callable[[Any], None]) -> LoadedModel:
    """The model with another tower, processor or projector."""
    vision = copy.deepcopy(model.vision)
    change(vision)
    return dataclasses.replace(model, vision=vision)


def set_mean(vision: Any) -> None:
    vision.processor.image_mean = [0.1, 0.2, 0.3]


def set_resample(vision: Any) -> None:
    vision.processor.resample = Image.Resampling.NEAREST


def set_layer(vision: Any) -> None:
    vision.select_layer = -1 if vision.select_layer != -1 else -2


def nudge(vision: Any) -> None:
    """Another revision of the weights: one of them by a hair that a float32 can hold and a sum can lose."""
    weight = next(p for p in vision.projector.parameters() if p.dim() == 2)
    weight.data[0, 0] = torch.nextafter(weight.data[0, 0], torch.tensor(9.0))


def respelled(model: LoadedModel) -> LoadedModel:
    """Another tokenizer with the same vocabulary."""
    tokenizer: Any = copy.deepcopy(model.tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("s", "x")
    return dataclasses.replace(model, tokenizer=tokenizer)


def cases() -> dict[str, Case]:
    base, limits = video_model(), MediaConfig()
    found: dict[str, Case] = {"base": (base, limits, of(BASE))}
    found |= {f"file {name}": (base, limits, of(data)) for name, data in (SAME | OTHERS).items()}
    found |= {f"pruned {name}": (base, limits, of(BASE, vision)) for name, vision in PRUNED.items()}
    found["drawn by another seed"] = (base, limits, of(BASE, PRUNED["drawn"], seed=1))
    for change in (set_mean, set_resample, set_layer, nudge):
        found[change.__name__] = (changed(base, change), limits, of(BASE))
    half = dataclasses.replace(changed(base, lambda vision: vision.to(torch.bfloat16)), dtype=torch.bfloat16)
    found["in bfloat16"] = (half, limits, of(BASE))
    found["a clip"] = (base, limits, showing(VideoPart(clip(frames=5))))
    fewer = changed(base, lambda vision: setattr(vision, "video", dataclasses.replace(vision.video, stride=1)))
    found["a clip pooled otherwise"] = (fewer, limits, showing(VideoPart(clip(frames=5))))
    timed = changed(base, lambda v: setattr(v, "video", dataclasses.replace(v.video, time="{seconds}s ")))
    found["a clip with times"] = (timed, limits, showing(VideoPart(clip(frames=5))))
    found["the same words spelled otherwise"] = (respelled(timed), limits, showing(VideoPart(clip(frames=5))))
    found["two pictures"] = (base, limits, showing(ImagePart(BASE), ImagePart(OTHERS["one bit"])))
    found["the other way round"] = (base, limits, showing(ImagePart(OTHERS["one bit"]), ImagePart(BASE)))
    return found


def encode(case: Case, cache: Caches) -> Encoded:
    model, limits, request = case
    [encoded] = Encoder(model, limits, max_tokens=200, cache=cache).encode([request])
    return encoded


def told(encoded: Encoded) -> tuple[object, ...]:
    """All that goes on to prefill, to the last bit."""
    assert encoded.features is not None
    places = None if encoded.places is None else encoded.places.tolist()
    bits = encoded.features.contiguous().view(torch.uint8).numpy().tobytes()
    return encoded.ids.tolist(), encoded.image_rows.tolist(), places, str(encoded.features.dtype), bits


@pytest.mark.parametrize("token_bytes", [1 << 24, 1 << 12])
def test_nobody_gets_an_entry_of_another(token_bytes: int) -> None:
    """Every case with every other before it, twice, in an order that is drawn; also where few entries have room."""
    asked = cases()
    expected = {name: told(encode(case, Caches.of(EncoderCacheConfig()))) for name, case in asked.items()}
    same = {name for name, tokens in expected.items() if tokens == expected["base"]}
    assert same - {"nudge"} == {"base", *(f"file {name}" for name in SAME)}, "the others would be seen to be others"
    cache = Caches.of(EncoderCacheConfig(token_bytes=token_bytes, pixel_bytes=token_bytes))
    order = [*asked, *asked]
    random.Random(0).shuffle(order)
    for name in order:
        assert told(encode(asked[name], cache)) == expected[name], name
    stats = cache.tokens.stats()
    assert stats.used_bytes <= token_bytes
    if token_bytes == 1 << 24:  # two of the cases show pictures that two others do
        assert (stats.made, stats.evicted) == (len(asked) - 2, 0)
    else:
        assert stats.evicted > 0


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (MediaConfig(max_pixels=40 * 30 - 1), "in all"),
        (MediaConfig(max_side=39), "a side"),
        (MediaConfig(max_item_bytes=99), "bytes; the limit is 99"),
    ],
)
def test_what_one_server_may_see_another_still_refuses(limits: MediaConfig, why: str) -> None:
    model, cache = video_model(), Caches.of(EncoderCacheConfig())
    encode((model, MediaConfig(), of(BASE)), cache)
    with pytest.raises(InvalidArgument, match=why):
        encode((model, limits, of(BASE)), cache)


def test_bytes_that_are_a_picture_are_no_clip() -> None:
    """One file under both names, in either order: what was found as the one is not taken for the other."""
    model, cache, film = video_model(), Caches.of(EncoderCacheConfig()), clip(frames=3)
    encode((model, MediaConfig(), showing(ImagePart(BASE))), cache)
    encode((model, MediaConfig(), showing(VideoPart(film))), cache)
    for parts in (VideoPart(BASE), ImagePart(film)):
        with pytest.raises(InvalidArgument, match="not a readable"):
            encode((model, MediaConfig(), showing(parts)), cache)
    assert cache.tokens.stats().entries == 2
