"""The layout of a stream in a prompt: the chat's header, labelled frames, then the question.

The same for streams, for a clip of archived frames that is prefilled again, and for the training data of the bundled
models. Shapes in names: D width of a visual token, R rows of a frame.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mmserve.core.encoded import DeepStack, Encoded, Past, Span
from mmserve.core.request import Amount, Request, TextPart
from mmserve.decode.extensions.image_reuse.checks import reused
from mmserve.encode.clip_encoder import VISUAL, ids_of
from mmserve.encode.embedding import embedded
from mmserve.encode.lengths import answer_length
from mmserve.encode.slow_fast import compacted
from mmserve.encode.visual_tokens import pruned
from mmserve.errors import FailedPrecondition, InvalidArgument, Unimplemented
from mmserve.kv.reuse import reuse_of
from mmserve.models.base import CanvasModel, LoadedModel, Model
from mmserve.models.chat import prompt_ids
from mmserve.models.decisions import shared_prompt
from mmserve.models.decoder_config import UNEVEN
from mmserve.models.picture import CannotPrepare, Picture, Prepared, VisionEncoder
from mmserve.prune.base import Evidence, Pruner
from mmserve.video.base import EncodedFrame, Frame
from mmserve.video.memory import Kind
from mmserve.video.rows import Table, Unit


def streaming_model(model: Model) -> LoadedModel:
    """``model``, if it supports streams; otherwise raises ``Unimplemented`` with the reason."""
    unable = f"model {model.spec.name!r} supports no streams of video"
    if isinstance(model, CanvasModel):
        raise Unimplemented(f"{unable}: its network has its own K/V cache")
    if model.spec.video_id is None or model.vision is None or not model.vision.frames_per_video:
        raise Unimplemented(f"{unable}: it takes no videos; ask one that does")
    if not model.decoder.config.plain_attention:
        raise Unimplemented(f"{unable}: {UNEVEN}")
    return model


def surrounding_ids(model: LoadedModel, request: Request) -> tuple[np.ndarray, np.ndarray]:
    """Ids (int64) of a chat before the stream, which precedes its last message's text, and after it; for typed
    questions up to where they begin.

    Raises ``InvalidArgument`` if the request has anything but text, ``FailedPrecondition`` if the model's chat format
    does not allow a video there.
    """
    chat = []
    for m, message in enumerate(request.messages):
        content: list[dict[str, str]] = []
        for p, part in enumerate(message.parts):
            if not isinstance(part, TextPart):
                raise InvalidArgument.of(f"messages[{m}].parts[{p}]", "must be text: the video is the stream")
            content.append({"type": "text", "text": part.text})
        chat.append({"role": message.role, "content": content})
    if not chat:
        raise InvalidArgument.of("messages", "must not be empty")
    chat[-1]["content"] = [{"type": "video"}, *chat[-1]["content"]]
    options = json.loads(request.template_options or "{}")
    special = model.spec.special_tokens
    made = prompt_ids(model.tokenizer, chat, options=options, special_tokens=special)
    if request.decisions:
        made = shared_prompt(model.tokenizer, made, special_tokens=special)
    ids = np.asarray(made, dtype=np.int64)
    found = np.flatnonzero(ids == model.spec.video_id)
    if len(found) != 1:
        raise FailedPrecondition(
            f"the chat format of model {model.spec.name!r} takes no video before the last message's text"
        )
    if (np.delete(ids, found) >= model.vocab_size).any():
        raise InvalidArgument.of("messages", "the text has a placeholder of media that this model does not take")
    return ids[: found[0]], ids[found[0] + 1 :]


def header_of(model: LoadedModel) -> np.ndarray:
    """Ids (int64) before the first frame of a stream: those of a chat that begins with it."""
    chat = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "?"}]}]
    ids = prompt_ids(model.tokenizer, chat, special_tokens=model.spec.special_tokens)
    if model.spec.video_id not in ids:
        raise FailedPrecondition(f"the chat format of model {model.spec.name!r} takes no chat that begins with a video")
    return np.asarray(ids[: ids.index(model.spec.video_id)], dtype=np.int64)


@dataclass(frozen=True)
class FrameRows:
    """A frame as rows, with its visual tokens ``[k, D]``; or a unit of several frames, up to this one.

    ``open``: whether the next frame becomes part of the same rows.
    """

    unit: Unit
    tokens_kD: Tensor
    detail: bool
    seen: EncodedFrame
    frames: tuple[Frame, ...] = ()
    open: bool = False
    number: int = -1  # of the unit in its stream; -1 = unknown

    @property
    def ids(self) -> np.ndarray:
        """Int64 ``[R]``, ``VISUAL`` for each visual token."""
        return self.unit.ids

    def at(self, number: int, time: int) -> FrameRows:
        """As unit ``number`` of its stream, at the time position ``time``."""
        coordinates = self.unit.coordinates.copy()
        coordinates[:1, self.ids == VISUAL] += time
        return replace(self, number=number, unit=replace(self.unit, coordinates=coordinates))

    def with_tokens(self, chosen: np.ndarray) -> FrameRows:
        """With only the ``chosen`` visual tokens (bool ``[k]``); if there are none, the label is removed, too."""
        if chosen.all():
            return self
        kept_rows = np.full(len(self.ids), bool(chosen.any()))
        kept_rows[self.ids == VISUAL] = chosen
        tokens = self.tokens_kD[torch.from_numpy(chosen).to(self.tokens_kD.device)]
        unit = replace(self.unit, ids=self.ids[kept_rows], coordinates=self.unit.coordinates[:, kept_rows])
        return replace(self, unit=unit, tokens_kD=tokens)


def axes_of(model: LoadedModel) -> int:
    """Number of the model's position axes; 0 = positions are single numbers."""
    return model.position_axes if model.position_axes > 1 else 0


@torch.inference_mode()
def encode_frame(
    model: LoadedModel, frames: tuple[Frame, ...], pruner: Pruner | None, amount: Amount | None
) -> FrameRows:
    """A frame after the tower, as one unit with the preceding ``frames``: labelled, and pruned by ``pruner`` or,
    without ``detail``, averaged to one token.

    Raises ``InvalidArgument`` for an image that the model does not support.
    """
    vision = model.vision
    assert vision is not None
    wanted = pruner.needs if pruner is not None else frozenset()
    clip, whole = _pictures(model, vision, frames, wanted)
    seen = EncodedFrame(frames[-1].seconds, clip.tokens, whole.tokens)
    detail, axes = any(frame.detail for frame in frames), axes_of(model)
    if not detail:
        # With row and column positions, the token has those of the centre, and the surrounding text has the time.
        mean = Picture(clip.tokens.mean(0, keepdim=True), (), (1,))
        clip, pruner = compacted(clip, [False] * len(clip.grids)) if axes else mean, None
    plans = None
    if pruner is not None and amount is not None:
        plans = pruner.plans([grid.view for grid in clip.grids], amount)
    tokens, chosen = pruned(clip, plans)
    ids = ids_of(clip.pieces, model.tokenizer).numpy()
    kept_rows = ids != VISUAL
    kept_rows[np.flatnonzero(~kept_rows)[chosen.numpy()]] = True
    coordinates = np.zeros((axes, len(ids)), dtype=np.int64)
    if axes and clip.coordinates is not None:
        coordinates[:, ids == VISUAL] = clip.coordinates.numpy()
    unit = Unit(ids[kept_rows], coordinates[:, kept_rows], frames[0].seconds, frames[-1].seconds, len(frames))
    return FrameRows(unit, tokens, detail, seen, frames, len(frames) < vision.frames_per_grid)


def _pictures(
    model: LoadedModel, vision: VisionEncoder, frames: tuple[Frame, ...], wanted: frozenset[Evidence]
) -> tuple[Picture, Picture]:
    """A clip of ``frames``, and the last one as a separate image; the clip twice if that image is not needed."""
    try:
        one = vision.prepare_clip([f.image for f in frames], [vision.label_seconds(f.seconds) for f in frames])
        if axes_of(model):  # ``Standing`` does not support it
            [clip] = vision.encode([_placed(model, one)], wanted, clip=True)
            return clip, clip
        image = None if vision.frames_are_images else vision.prepare(frames[-1].image)
    except CannotPrepare as error:
        raise InvalidArgument.of("frame", str(error)) from error
    return vision.encode_frame(_placed(model, one), None if image is None else _placed(model, image), wanted)


def _placed(model: LoadedModel, one: Prepared) -> Prepared:
    return {**one, "pixels": one["pixels"].to(model.device, model.dtype)}


def embedded_rows(model: LoadedModel, ids: np.ndarray, tokens_kD: Tensor | None) -> tuple[Tensor, DeepStack | None]:
    """Embeddings ``[R, D]`` of rows including visual tokens, and the features that these add in later layers."""
    visual = np.flatnonzero(ids == VISUAL)
    tokens = None if tokens_kD is None or not len(visual) else tokens_kD.to(model.dtype)
    return embedded(model, ids, Encoded(ids, visual, tokens))


@dataclass(frozen=True)
class Branch:
    """The part of a stream that a question attends to: rows, the K/V ``[N, n, G, K]`` of the first n of them, and the
    visual tokens ``[k, D]`` of all, None if all rows have K/V."""

    table: Table
    keys: Tensor | None
    values: Tensor | None
    tokens_kD: Tensor | None
    header: np.ndarray  # int64: ids of the sinks

    @property
    def times(self) -> tuple[int, float, float]:
        """The number of frames, without carriers, and the times (seconds) of the first and the last."""
        own = self.table.take(np.flatnonzero(self.table.kind >= Kind.LABEL))
        _units, first = np.unique(own.frame, return_index=True)
        return int(own.frames[first].sum()), float(own.begin.min()), float(own.seconds.max())


def question(model: LoadedModel, request: Request, branch: Branch, *, most: int) -> tuple[Encoded, int]:
    """A request's prompt with the branch of a stream in it, and the number of its rows that must be run.

    The header is the stream's own if the chat begins in the same way; after other messages it is run, and the rows of
    frames are rotated to their new positions. Raises ``InvalidArgument`` if prompt and answer exceed ``most`` rows, or
    the model's positions.
    """
    before, after = surrounding_ids(model, request)
    table, own = branch.table, np.array_equal(before, branch.header)
    sinks = len(branch.header)
    kept = table if own else table.take(np.arange(sinks, len(table)))
    front = before[:0] if own else before
    rows = kept.ids.copy()
    rows[kept.visual] = model.spec.video_id or 0
    ids = np.concatenate([front, rows, after])
    start, new = len(front), answer_length(request, model)
    if len(ids) + new > min(most, model.spec.max_tokens):
        raise InvalidArgument.of(
            "messages",
            f"a prompt of {len(ids)} tokens, {len(kept)} of them of the stream, and {new} new ones exceed the limit of "
            f"{min(most, model.spec.max_tokens)}; ask for less, or keep less of the stream",
        )
    shift = 0 if own else len(before) - sinks
    places = _places(kept, shift, front, len(after))
    if places is not None and int(places[..., -1].max()) + new > model.spec.max_tokens:
        # No positions are left after theirs: renumber from 0, as in ``renumber``.
        places = _places(kept.numbered(), len(front), front, len(after))
    past, skip = None, 0 if own else sinks
    if branch.keys is not None and branch.values is not None and (held := branch.keys.shape[1] - skip) > 0:
        past = Past(np.arange(start, start + held), branch.keys[:, skip:], branch.values[:, skip:])
    spans = () if past is not None or len(kept.coordinates) else _spans(kept, start, places)
    encoded = Encoded(ids, start + kept.visual, branch.tokens_kD, places=places, spans=spans, past=past)
    skipped = reused(reuse_of(request), encoded) if past is None else len(past.rows)
    return encoded, len(ids) - skipped


def _places(kept: Table, shift: int, front: np.ndarray, after: int) -> np.ndarray | None:
    """Rotary positions of a prompt's rows and of its answer's start, int64 ``[prompt + 1]`` or ``[axes, prompt + 1]``;
    None = indices."""
    axes = kept.places.shape[:-1]
    texts = (np.arange(len(front)), kept.following + shift + np.arange(after + 1))
    first, last = (np.broadcast_to(text, (*axes, len(text))) for text in texts)
    places = np.concatenate([first, kept.places + shift, last], axis=-1)
    return None if np.array_equal(places, np.arange(places.shape[-1])) else places


def _spans(kept: Table, start: int, places: np.ndarray | None) -> tuple[Span, ...]:
    """Each frame as a separate clip: ``image_reuse`` reuses the K/V of each, also in the next question."""
    found = []
    for frame in np.unique(kept.frame[kept.kind >= Kind.LABEL]):
        rows = start + np.flatnonzero((kept.frame == frame) & (kept.kind >= Kind.LABEL))
        first = int(rows[0])
        found.append(Span(first, int(rows[-1]) + 1, first if places is None else int(places[first]), True))
    return tuple(found)
