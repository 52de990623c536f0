"""What sessions must know of a model that may be in another process: plain data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mmserve.capabilities import Capabilities
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.models.adapters import STREAMS
from mmserve.models.base import Model
from mmserve.models.picture import Resize
from mmserve.video.layout import streaming_model
from mmserve.video.standing import Standing


@dataclass(frozen=True)
class Facts:
    """Of one model. ``refusal``: why it takes no sessions, empty where it does; ``standing``: whether it can be asked
    standing questions; ``resize``: what it does first to every frame, as one of a clip and as an image by itself;
    ``label_period``: as of ``SessionContext``; ``keeps_kv``: as of the function."""

    refusal: str = ""
    standing: bool = False
    resize: Resize | None = None
    label_period: int = 0
    keeps_kv: bool = False

    def check(self) -> None:
        """Raise ``Unimplemented`` where the model takes no sessions."""
        if self.refusal:
            raise Unimplemented(self.refusal)


def facts_of(model: Model, offered: Capabilities) -> Facts:
    """Those of ``model``, of which an engine offers what ``offered`` has."""
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
        keeps_kv(model, offered),
    )


def keeps_kv(model: Model, offered: Capabilities) -> bool:
    """Whether streams keep K/V of their frames, which no adapter has changed; otherwise only visual tokens."""
    return model.spec.attention_block is not None and offered.reads_pages


def adapter_of(asked: str, known: Collection[str], *, kept: bool) -> str:
    """As of ``Streams.adapter_for``, of a model with the adapters ``known`` that keeps K/V of its frames, or not."""
    if asked and kept:
        why = "must not be set with a question about a stream: this model keeps K/V of the frames without it"
        raise InvalidArgument.of("adapter", why)
    return asked or (STREAMS if STREAMS in known and not kept else "")


def standing_of(model: Model) -> Standing | None:
    """What asks standing questions of ``model``; None where it cannot be asked any."""
    try:
        return Standing(model)
    except Unimplemented:
        return None
