"""The visual tokens of the frames of clips, computed once: windows of streams are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mmserve.reference.clips import Clip, through_h264
from mmserve.reference.data import pixels_of
from mmserve.reference.model import ReferenceModel
from mmserve.reference.streams import Window, frame_times

#: One clip in so many is written as H.264 and read again.
COMPRESSED = 3


class SeenFrames:
    """Visual tokens ``[seconds, FRAME_TOKENS, D]`` of each of some clips, bf16 to save memory."""

    def __init__(self, clips: Sequence[Clip], tokens: Sequence[Tensor]) -> None:
        self.clips = tuple(clips)
        self._tokens = dict(zip(self.clips, tokens, strict=True))

    @classmethod
    @torch.no_grad()
    def compute(cls, model: ReferenceModel, clips: Sequence[Clip]) -> SeenFrames:
        """Draw the frames of ``clips`` and run them through the model's tower and projector."""
        device = model.decoder.embed.weight.device
        tokens = []
        for number, clip in enumerate(clips):
            times = frame_times(clip)
            pictures = through_h264(clip, times) if number % COMPRESSED == 0 else clip.frames(times).pictures
            pixels = torch.stack([pixels_of(picture) for picture in pictures]).to(device)
            tokens.append(model.visual(model.image_features(pixels)[0], pooled=True).to("cpu", torch.bfloat16))
        return cls(clips, tokens)

    @classmethod
    def kept(cls, path: Path, model: ReferenceModel, clips: Sequence[Clip]) -> SeenFrames:
        """What ``compute`` returns, from the file ``path`` where it was computed before with the same weights."""
        weights = torch.cat(
            [p.detach().flatten().cpu() for p in (*model.tower.parameters(), *model.projector.parameters())]
        )
        key = {"weights": float(weights.double().square().sum()), "clips": len(clips), "looks": hash_of(clips)}
        if path.exists():
            saved = torch.load(path, weights_only=True)
            if saved["key"] == key:
                return cls(clips, saved["tokens"])
        seen = cls.compute(model, clips)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"key": key, "tokens": [seen._tokens[clip] for clip in seen.clips]}, path)
        return seen

    def frame(self, clip: Clip, index: int) -> Tensor:
        """The visual tokens ``[FRAME_TOKENS, D]`` of one frame."""
        return self._tokens[clip][index]

    def of(self, windows: Sequence[Window]) -> Tensor:
        """The visual tokens of ``windows`` in order, ``[1, n, D]``: one for a carrier, all of a whole frame."""
        rows = []
        for window in windows:
            for index, (clip, frame) in enumerate(window.frames):
                tokens = self.frame(window.clips[clip], frame)
                rows.append(
                    tokens.float().mean(0, keepdim=True).to(tokens.dtype) if index < window.carriers else tokens
                )
        return torch.cat(rows)[None]


def hash_of(clips: Sequence[Clip]) -> int:
    """A number that distinguishes sets of clips."""
    return sum((number + 1) * clip.look for number, clip in enumerate(clips)) % (1 << 60)
