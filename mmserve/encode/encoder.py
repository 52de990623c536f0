"""The encode stage: chat messages, images and videos to a row of ids and visual tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmserve.config import MediaConfig
from mmserve.core.request import ImagePart, Part, Request, TextPart, VideoPart
from mmserve.decode.commit import ACCOMPANIED
from mmserve.decode.state import Encoded
from mmserve.encode.media import decode_image
from mmserve.encode.video import decode_video
from mmserve.errors import FailedPrecondition, FieldViolation, InvalidArgument
from mmserve.models.base import LoadedModel, Model
from mmserve.models.chat import prompt_ids


@dataclass(frozen=True)
class _Rows:
    """A piece of a prompt: ids, which of their rows are visual, and the features of those."""

    ids: np.ndarray  # int64 [rows]
    visual: np.ndarray  # bool [rows]
    features: Tensor | None  # [visual rows, D]; None for text
    beside: Tensor | None = None  # the same by the companion's tower, where the request's policy asks for it


class Encoder:
    """Encode of one model, and of its companion where a request's policy asks for it; holds no state of any request."""

    def __init__(self, model: Model, media: MediaConfig, *, max_tokens: int) -> None:
        self.model, self.media, self.max_tokens = model, media, max_tokens

    @torch.inference_mode()
    def encode(self, batch: list[Request]) -> list[Encoded]:
        """Each request's prompt with its visual tokens; typed errors for bad media and for prompts too long."""
        pixels = [self._pixels(request) for request in batch]
        mine = iter(_features(self.model, [p[0] for group in pixels for p in group]))
        its = iter(_features(self._companion(*batch), [p[1] for group in pixels for p in group if len(p) > 1]))
        images = [[self._image_rows(*map(next, (mine, its)[: len(p)])) for p in group] for group in pixels]
        return [self._splice(r, i, self._videos(r)) for r, i in zip(batch, images, strict=True)]

    def _companion(self, *requests: Request) -> LoadedModel | None:
        """The companion, if the policy of any of ``requests`` asks for it."""
        return self.model.companion if any(r.diffusion.commit.name in ACCOMPANIED for r in requests) else None

    def _models(self, request: Request) -> list[Model]:
        """The models that look at a request's media: the served one and, if it is asked for, its companion."""
        companion = self._companion(request)
        return [self.model, *([companion] if companion is not None else [])]

    def _pixels(self, request: Request) -> list[list[Tensor]]:
        """Of each image, its pixels as each model that looks at it takes them."""
        images = [(f"{path}.image", part.data) for path, part in _parts(request) if isinstance(part, ImagePart)]
        if not images:
            return []
        visions = [model.vision for model in self._models(request) if model.vision is not None]
        if len(visions) < len(self._models(request)):
            raise self._blind(request, "images")
        decoded = (decode_image(data, self.media, field=field) for field, data in images)  # one at a time in memory
        return [[vision.prepare(image) for vision in visions] for image in decoded]

    def _blind(self, request: Request, what: str) -> FailedPrecondition:
        name, companion = self.model.spec.name, self._companion(request)
        if companion is None:
            return FailedPrecondition(f"the model {name!r} takes no {what}; ask one that does")
        policy = request.diffusion.commit.name
        return FailedPrecondition(
            f"the model {name!r} or its companion {companion.spec.name!r}, which {policy!r} needs, takes no {what}"
        )

    def _image_rows(self, features: Tensor, beside: Tensor | None = None) -> _Rows:
        spec = self.model.spec
        before, behind = spec.image_frame
        ids = np.array([*before, *[spec.image_id] * len(features), *behind], dtype=np.int64)
        visual = np.zeros(len(ids), dtype=bool)
        visual[len(before) : len(before) + len(features)] = True
        return _Rows(ids, visual, features, beside)

    def _videos(self, request: Request) -> list[_Rows]:
        videos = [(f"{path}.video", part.data) for path, part in _parts(request) if isinstance(part, VideoPart)]
        if not videos:
            return []
        for model in self._models(request):
            if model.vision is None or not model.vision.frames_per_video or model.spec.video_id is None:
                raise self._blind(request, "videos")
        return [self._video_rows(self._companion(request), data, field) for field, data in videos]

    def _video_rows(self, companion: LoadedModel | None, data: bytes, field: str) -> _Rows:
        """A clip's rows: of each frame its text, where the model has one, and its visual tokens."""
        vision, placeholder = self.model.vision, self.model.spec.video_id
        assert vision is not None and placeholder is not None
        clip = decode_video(data, self.media, frames=vision.frames_per_video, field=field)
        tokens = _clip_tokens(self.model, clip.frames)
        beside = torch.cat(_clip_tokens(companion, clip.frames)) if companion is not None else None
        ids: list[int] = []
        visual: list[bool] = []
        for seconds, frame in zip(clip.seconds, tokens, strict=True):
            text = self.model.tokenizer.encode(vision.frame_text(seconds), add_special_tokens=False)
            ids += [*text, *[placeholder] * len(frame)]
            visual += [*[False] * len(text), *[True] * len(frame)]
        return _Rows(np.asarray(ids, dtype=np.int64), np.asarray(visual, dtype=bool), torch.cat(tokens), beside)

    def _splice(self, request: Request, images: list[_Rows], videos: list[_Rows]) -> Encoded:
        """The prompt, with the rows of an image or video in the place of each placeholder."""
        spec = self.model.spec
        ids = np.asarray(self._prompt(request), dtype=np.int64)
        waiting: dict[int, Iterator[_Rows]] = {}
        for placeholder, kind, one, rows in (
            (spec.image_id, "image", "an image", images),
            (spec.video_id, "video", "a video", videos),
        ):
            places = int((ids == placeholder).sum()) if placeholder is not None else 0
            if places != len(rows):
                raise InvalidArgument.of(
                    "messages", f"the text holds {places - len(rows)} {kind} placeholders without {one}"
                )
            if placeholder is not None:
                waiting[placeholder] = iter(rows)
        pieces: list[_Rows] = []
        start = 0
        for place in np.flatnonzero(np.isin(ids, list(waiting))):
            pieces += [_text_rows(ids[start:place]), next(waiting[int(ids[place])])]
            start = int(place) + 1
        pieces.append(_text_rows(ids[start:]))
        spliced = np.concatenate([piece.ids for piece in pieces])
        if len(spliced) < max(m.spec.logit_shift for m in self._models(request)):
            raise InvalidArgument.of("messages", "the prompt has no token that an answer could follow")
        self._check_length(len(spliced), request.sampling.max_new_tokens)
        features = [piece.features for piece in pieces if piece.features is not None]
        visual = np.flatnonzero(np.concatenate([piece.visual for piece in pieces]))
        beside = [piece.beside for piece in pieces if piece.beside is not None]
        if any(piece.beside is not None and len(piece.beside) != piece.visual.sum() for piece in pieces):
            raise FailedPrecondition(f"the companion of {spec.name!r} has another number of visual tokens than that")
        return Encoded(
            spliced, visual, torch.cat(features) if features else None, torch.cat(beside) if beside else None
        )

    def _prompt(self, request: Request) -> list[int]:
        chat = [{"role": m.role, "content": [_content(part) for part in m.parts]} for m in request.messages]
        return prompt_ids(self.model.tokenizer, chat)

    def _check_length(self, prompt: int, new: int) -> None:
        if prompt + new > self.max_tokens:
            raise InvalidArgument(
                FieldViolation(
                    "sampling.max_new_tokens" if prompt < self.max_tokens else "messages",
                    f"a prompt of {prompt} tokens and {new} new ones exceed the limit of {self.max_tokens}; "
                    "shorten the prompt or lower max_new_tokens",
                )
            )


def _features(model: Model | None, pixels: list[Tensor]) -> list[Tensor]:
    """Visual tokens ``[n, D]`` of each image; images of one size go through the tower together."""
    if model is None or model.vision is None or not pixels:
        return []
    order = sorted(range(len(pixels)), key=lambda i: tuple(pixels[i].shape))
    features: dict[int, Tensor] = {}
    for _shape, group in groupby(order, key=lambda i: tuple(pixels[i].shape)):
        indices = list(group)
        stacked = torch.stack([pixels[i] for i in indices]).to(model.device, model.dtype)
        features.update(zip(indices, model.vision(stacked), strict=True))
    return [features[i] for i in range(len(pixels))]


def _clip_tokens(model: Model, frames: Sequence[Image.Image]) -> list[Tensor]:
    """Visual tokens ``[n, D]`` of each frame of a clip.

    The frames of one clip go through the tower together, and with no others: the batch has no say in them.
    """
    assert model.vision is not None
    pixels = torch.stack([model.vision.prepare(frame) for frame in frames])
    return model.vision.video_tokens(pixels.to(model.device, model.dtype))


def _parts(request: Request) -> Iterator[tuple[str, Part]]:
    """Every part with its path in the request message."""
    for m, message in enumerate(request.messages):
        for p, part in enumerate(message.parts):
            yield f"messages[{m}].parts[{p}]", part


def _text_rows(ids: np.ndarray) -> _Rows:
    return _Rows(ids, np.zeros(len(ids), dtype=bool), None)


def _content(part: Part) -> dict[str, str]:
    """A part as chat templates take it."""
    match part:
        case TextPart(text):
            return {"type": "text", "text": text}
        case ImagePart():
            return {"type": "image"}
        case VideoPart():
            return {"type": "video"}
