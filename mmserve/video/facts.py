"""What sessions must know of a model that may be in another process: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.errors import Unimplemented
from mmserve.models.base import Model
from mmserve.models.picture import Resize
from mmserve.video.layout import streaming_model
from mmserve.video.standing import Standing


@dataclass(frozen=True)
class Facts:
    """Of one model. ``refusal``: why it takes no sessions, empty where it does; ``standing``: whether it can be asked
    standing questions; ``resize``: what it does first to every frame, as one of a clip and as an image by itself;
    ``label_period``: as of ``Surroundings``."""

    refusal: str = ""
    standing: bool = False
    resize: Resize | None = None
    label_period: int = 0

    def check(self) -> None:
        """Raise ``Unimplemented`` where the model takes no sessions."""
        if self.refusal:
            raise Unimplemented(self.refusal)


def facts_of(model: Model) -> Facts:
    """Those of ``model``."""
    vision = model.vision
    refusal = ""
    try:
        streaming_model(model)
    except Unimplemented as error:
        refusal = error.message
    first = set() if vision is None else {vision.first_resize(clip=clip, among=False) for clip in (True, False)}
    return Facts(
        refusal,
        standing_of(model) is not None,
        first.pop() if len(first) == 1 else None,
        int(vision.time_period) if vision is not None else 0,
    )


def standing_of(model: Model) -> Standing | None:
    """What asks standing questions of ``model``; None where it cannot be asked any."""
    try:
        return Standing(model)
    except Unimplemented:
        return None
