"""The place of a stream in a prompt: the chat's header, frame after frame with its label, then the question.

The same for the frames of a stream, for a clip of them that is prefilled anew, and for what the bundled models are
taught. Shapes in names: D width of a visual token, R rows of a frame.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mmserve.core.encoded import Encoded, Past, Span
from mmserve.core.request import Amount, Request, TextPart
from mmserve.decode.extensions.image_reuse.checks import reused
from mmserve.encode.visual import pruned
from mmserve.encode.watching import VISUAL, ids_of
from mmserve.errors import FailedPrecondition, InvalidArgument, Unimplemented
from mmserve.kv.reuse import reuse_of
from mmserve.models.base import CanvasModel, LoadedModel, Model
from mmserve.models.chat import prompt_ids
from mmserve.models.picture import CannotPrepare, Prepared
from mmserve.prune.base import Pruner
from mmserve.video.base import Frame, Seen
from mmserve.video.memory import Kind
from mmserve.video.rows import Table


def streaming_model(model: Model) -> LoadedModel:
    """``model``, if it can keep streams; otherwise raises ``Unimplemented`` with the reason."""
    unable = f"model {model.spec.name!r} keeps no streams of video"
    if isinstance(model, CanvasModel):
        raise Unimplemented(f"{unable}: its network keeps its K/V to itself")
    if model.spec.video_id is None or model.vision is None or not model.vision.frames_per_video:
        raise Unimplemented(f"{unable}: it takes no videos; ask one that does")
    if model.position_axes > 1 or model.decoder.config.deep_layers:
        raise Unimplemented(f"{unable}: its positions have several axes, or visual tokens enter several layers")
    return model


def around(model: LoadedModel, request: Request) -> tuple[np.ndarray, np.ndarray]:
    """Ids (int64) of a chat up to where the stream stands, in front of its last message's text, and from there on.

    ``InvalidArgument`` where the request holds anything but text, ``FailedPrecondition`` where the model's chat format
    takes no video there.
    """
    chat = []
    for m, message in enumerate(request.messages):
        content: list[dict[str, str]] = []
        for p, part in enumerate(message.parts):
            if not isinstance(part, TextPart):
                raise InvalidArgument.of(f"messages[{m}].parts[{p}]", "must be text: the stream is what is asked about")
            content.append({"type": "text", "text": part.text})
        chat.append({"role": message.role, "content": content})
    if not chat:
        raise InvalidArgument.of("messages", "must not be empty")
    chat[-1]["content"] = [{"type": "video"}, *chat[-1]["content"]]
    ids = np.asarray(prompt_ids(model.tokenizer, chat, special_tokens=model.spec.special_tokens), dtype=np.int64)
    found = np.flatnonzero(ids == model.spec.video_id)
    if len(found) != 1:
        raise FailedPrecondition(
            f"the chat format of model {model.spec.name!r} takes no video in front of the last message's text"
        )
    if (np.delete(ids, found) >= model.vocab_size).any():
        raise InvalidArgument.of("messages", "the text holds a placeholder of media that this model does not take")
    return ids[: found[0]], ids[found[0] + 1 :]


def header_of(model: LoadedModel) -> np.ndarray:
    """Ids (int64) in front of the first frame of a stream: a chat's that begins with it."""
    chat = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "?"}]}]
    ids = prompt_ids(model.tokenizer, chat, special_tokens=model.spec.special_tokens)
    if model.spec.video_id not in ids:
        raise FailedPrecondition(f"the chat format of model {model.spec.name!r} takes no chat that begins with a video")
    return np.asarray(ids[: ids.index(model.spec.video_id)], dtype=np.int64)


@dataclass(frozen=True)
class Shown:
    """A frame as rows: ``ids`` (int64 ``[R]``, ``VISUAL`` for each visual token), and those tokens ``[k, D]``."""

    seconds: float
    ids: np.ndarray
    tokens_kD: Tensor
    detail: bool
    seen: Seen
    number: int = -1  # of the frame in its stream; -1 = not known yet

    def with_tokens(self, chosen: np.ndarray) -> Shown:
        """With some of its visual tokens (bool ``[k]``); without any of them no label is left either."""
        if chosen.all():
            return self
        left = np.full(len(self.ids), bool(chosen.any()))
        left[self.ids == VISUAL] = chosen
        tokens = self.tokens_kD[torch.from_numpy(chosen).to(self.tokens_kD.device)]
        return replace(self, ids=self.ids[left], tokens_kD=tokens)


@torch.inference_mode()
def see(model: LoadedModel, frame: Frame, pruner: Pruner | None, amount: Amount | None) -> Shown:
    """A frame through the tower: with its label and pruned by ``pruner``, or (not ``detail``) one token, their mean.

    ``InvalidArgument`` for a picture that the model cannot take.
    """
    vision = model.vision
    assert vision is not None
    try:
        one = vision.prepare_clip([frame.image], [vision.label_seconds(frame.seconds)])
        image = None if vision.frames_are_images else vision.prepare(frame.image)
    except CannotPrepare as error:
        raise InvalidArgument.of("frame", str(error)) from error
    wanted = pruner.needs if pruner is not None else frozenset()
    clip, alone = vision.see_frame(_placed(model, one), None if image is None else _placed(model, image), wanted)
    seen = Seen(frame.seconds, clip.tokens, alone.tokens)
    if not frame.detail:
        return Shown(frame.seconds, np.array([VISUAL]), clip.tokens.mean(0, keepdim=True), False, seen)
    plans = None
    if pruner is not None and amount is not None:
        plans = pruner.plans([grid.look for grid in clip.grids], amount)
    tokens, chosen = pruned(clip, plans)
    ids = ids_of(clip.pieces, model.tokenizer).numpy()
    left = ids != VISUAL
    left[np.flatnonzero(~left)[chosen.numpy()]] = True
    return Shown(frame.seconds, ids[left], tokens, True, seen)


def _placed(model: LoadedModel, one: Prepared) -> Prepared:
    return {**one, "pixels": one["pixels"].to(model.device, model.dtype)}


def embedded_rows(model: LoadedModel, ids: np.ndarray, tokens_kD: Tensor | None) -> Tensor:
    """Embeddings ``[R, D]`` of rows, visual tokens in their places."""
    visual = np.flatnonzero(ids == VISUAL)
    text = np.where(ids == VISUAL, model.spec.mask_id, ids)  # a placeholder may have no embedding
    x_RD: Tensor = model.decoder.embed(torch.from_numpy(text).to(model.device))
    if tokens_kD is not None and len(visual):
        x_RD[torch.from_numpy(visual).to(model.device)] = tokens_kD.to(x_RD.dtype)
    return x_RD


@dataclass(frozen=True)
class Branch:
    """What a question sees of a stream: rows, and their K/V ``[N, n, G, K]`` or their visual tokens ``[k, D]``."""

    table: Table
    keys: Tensor | None
    values: Tensor | None
    tokens_kD: Tensor | None
    header: np.ndarray  # int64: ids of the sinks

    @property
    def times(self) -> tuple[int, float, float]:
        """How many frames it has, carriers left out, and the seconds of the first and the last."""
        own = self.table.kind >= Kind.LABEL
        seconds = self.table.seconds[own]
        return len(np.unique(self.table.frame[own])), float(seconds.min()), float(seconds.max())


def question(model: LoadedModel, request: Request, branch: Branch, *, most: int) -> tuple[Encoded, int]:
    """A request's prompt with the branch of a stream in it, and how many of its rows have to be run.

    The header is the stream's own where the chat begins as the stream's does; after other messages it is run, and the
    rows of frames are turned to their places there. ``InvalidArgument`` where prompt and answer are more than ``most``
    rows, or more positions than the model has.
    """
    before, after = around(model, request)
    table, own = branch.table, np.array_equal(before, branch.header)
    sinks = len(branch.header)
    kept = table if own else table.take(np.arange(sinks, len(table)))
    front = before[:0] if own else before
    rows = kept.ids.copy()
    rows[kept.visual] = model.spec.video_id or 0
    ids = np.concatenate([front, rows, after])
    start, end, new = len(front), len(front) + len(kept), request.sampling.max_new_tokens
    if len(ids) + new > min(most, model.spec.max_tokens):
        raise InvalidArgument.of(
            "messages",
            f"a prompt of {len(ids)} tokens, {len(kept)} of them of the stream, and {new} new ones exceed the limit of "
            f"{min(most, model.spec.max_tokens)}; ask for less, or keep less of the stream",
        )
    places = _places(kept, 0 if own else len(before) - sinks, front, len(after))
    if places is not None and int(places[-1]) + new > model.spec.max_tokens:
        places = None  # no room after their places: numbered from 0, as after ``renumber``
    past = None
    if branch.keys is not None and branch.values is not None:
        skip = 0 if own else sinks
        past = Past(np.arange(start, end), branch.keys[:, skip:], branch.values[:, skip:])
    spans = () if past is not None else _spans(kept, start, places)
    encoded = Encoded(ids, start + kept.visual, branch.tokens_kD, places=places, spans=spans, past=past)
    spared = reused(reuse_of(request), encoded) if past is None else len(past.rows)
    return encoded, len(ids) - spared


def _places(kept: Table, shift: int, front: np.ndarray, after: int) -> np.ndarray | None:
    """Where a prompt's rows stand, and its answer begins (int64 ``[prompt + 1]``); None = each where it is."""
    own = kept.places + shift
    last = int(own[-1]) + 1 if len(own) else len(front)
    places = np.concatenate([np.arange(len(front)), own, last + np.arange(after + 1)])
    return None if np.array_equal(places, np.arange(len(places))) else places


def _spans(kept: Table, start: int, places: np.ndarray | None) -> tuple[Span, ...]:
    """Each frame as a clip by itself: what ``image_reuse`` takes K/V of, and finds again at the next question."""
    found = []
    for frame in np.unique(kept.frame[kept.kind >= Kind.LABEL]):
        rows = start + np.flatnonzero((kept.frame == frame) & (kept.kind >= Kind.LABEL))
        first = int(rows[0])
        found.append(Span(first, int(rows[-1]) + 1, first if places is None else int(places[first]), True))
    return tuple(found)
