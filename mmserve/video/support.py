"""Properties of a model that sessions need, also if it is in another process: plain data."""

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
class SessionSupport:
    """Properties of one model. ``refusal``: the reason why it does not support sessions, empty if it does;
    ``standing``: whether it supports standing questions; ``resize``: the first step of preparing every frame, as part
    of a clip and as a separate image; ``label_period``: see ``SessionContext``; ``keeps_kv``: see the function."""

    refusal: str = ""
    standing: bool = False
    resize: Resize | None = None
    label_period: int = 0
    keeps_kv: bool = False

    def check(self) -> None:
        """Raises ``Unimplemented`` if the model does not support sessions."""
        if self.refusal:
            raise Unimplemented(self.refusal)


def session_support(model: Model, offered: Capabilities) -> SessionSupport:
    """The properties of ``model`` in an engine that offers ``offered``."""
    vision = model.vision
    refusal = ""
    try:
        streaming_model(model)
    except Unimplemented as error:
        refusal = error.message
    first = set() if vision is None else {vision.first_resize(clip=clip, among=False) for clip in (True, False)}
    return SessionSupport(
        refusal,
        standing_of(model) is not None,
        first.pop() if len(first) == 1 else None,
        int(vision.time_period) if vision is not None else 0,
        keeps_kv(model, offered),
    )


def keeps_kv(model: Model, offered: Capabilities) -> bool:
    """Whether streams keep K/V of their frames, which requires that no adapter changes them; otherwise only visual
    tokens."""
    return model.spec.attention_block is not None and offered.reads_pages


def adapter_of(asked: str, known: Collection[str], *, kept: bool) -> str:
    """See ``Streams.adapter_for``; ``known``: the model's adapters, ``kept``: whether streams keep K/V of their
    frames."""
    if asked and kept:
        why = "must not be set with a question about a stream: this model keeps K/V of the frames without it"
        raise InvalidArgument.of("adapter", why)
    return asked or (STREAMS if STREAMS in known and not kept else "")


def standing_of(model: Model) -> Standing | None:
    """The standing questions of ``model``; None if they are not supported."""
    try:
        return Standing(model)
    except Unimplemented:
        return None
