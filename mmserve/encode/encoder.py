"""The encode stage: chat messages and images to a row of ids and visual tokens."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from mmserve.config import MediaConfig
from mmserve.core.request import ImagePart, Request
from mmserve.decode.state import Encoded
from mmserve.encode.media import decode_image
from mmserve.errors import FailedPrecondition, FieldViolation, InvalidArgument
from mmserve.models.base import LoadedModel
from mmserve.models.chat import prompt_ids


class Encoder:
    """Encode of one model; holds no state of any request."""

    def __init__(self, model: LoadedModel, media: MediaConfig, *, max_tokens: int) -> None:
        self.model, self.media, self.max_tokens = model, media, max_tokens

    @torch.inference_mode()
    def encode(self, batch: list[Request]) -> list[Encoded]:
        """Each request's prompt with its visual tokens; typed errors for bad media and for prompts too long."""
        pixels = [self._pixels(request) for request in batch]
        features = iter(self._features([p for group in pixels for p in group]))
        return [self._splice(r, [next(features) for _ in group]) for r, group in zip(batch, pixels, strict=True)]

    def _pixels(self, request: Request) -> list[Tensor]:
        images = [
            (f"messages[{m}].parts[{p}].image", part.data)
            for m, message in enumerate(request.messages)
            for p, part in enumerate(message.parts)
            if isinstance(part, ImagePart)
        ]
        if not images:
            return []
        if self.model.vision is None:
            raise FailedPrecondition(f"the model {self.model.spec.name!r} takes no images; ask one that does")
        return [self.model.vision.prepare(decode_image(data, self.media, field=field)) for field, data in images]

    def _features(self, pixels: list[Tensor]) -> list[Tensor]:
        """Visual tokens ``[n, D]`` of each image; images of one size go through the tower together."""
        if not pixels or self.model.vision is None:
            return []
        dtype, device = self.model.dtype, self.model.device
        order = sorted(range(len(pixels)), key=lambda i: tuple(pixels[i].shape))
        features: dict[int, Tensor] = {}
        for _shape, group in groupby(order, key=lambda i: tuple(pixels[i].shape)):
            indices = list(group)
            stacked = torch.stack([pixels[i] for i in indices]).to(device, dtype)
            features.update(zip(indices, self.model.vision(stacked), strict=True))
        return [features[i] for i in range(len(pixels))]

    def _splice(self, request: Request, features: list[Tensor]) -> Encoded:
        """Each image placeholder of the prompt becomes as many rows as the image has visual tokens."""
        spec = self.model.spec
        ids = np.asarray(self._prompt(request), dtype=np.int64)
        places = np.flatnonzero(ids == spec.image_id) if spec.image_id is not None else np.zeros(0, np.int64)
        if len(places) != len(features):
            raise InvalidArgument.of(
                "messages", f"the text holds {len(places) - len(features)} image placeholders without an image"
            )
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[places] = [len(f) for f in features]
        expanded = np.repeat(ids, repeats)
        is_image = np.repeat(np.isin(np.arange(len(ids)), places), repeats)
        self._check_length(len(expanded), request.sampling.max_new_tokens)
        return Encoded(expanded, np.flatnonzero(is_image), torch.cat(features) if features else None)

    def _prompt(self, request: Request) -> list[int]:
        chat = [
            {
                "role": message.role,
                "content": [
                    {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
                    for part in message.parts
                ],
            }
            for message in request.messages
        ]
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
