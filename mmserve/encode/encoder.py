"""The encode stage: chat messages, images and videos to a sequence of ids and visual tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmserve.config import EncoderCacheConfig, MediaConfig
from mmserve.core.cached import Label
from mmserve.core.encoded import Encoded
from mmserve.core.payloads import VisualPayload
from mmserve.core.request import (
    ImagePart,
    Part,
    PixelRange,
    Request,
    VideoPart,
)
from mmserve.core.share import MediaShare
from mmserve.core.tuning import ACCOMPANIED
from mmserve.encode.arriving import Arriving
from mmserve.encode.clip_encoder import VISUAL
from mmserve.encode.clip_parts import whole_of
from mmserve.encode.decoders import Check, Decoders
from mmserve.encode.lengths import answer_length, check_length
from mmserve.encode.prompts import prompt_of
from mmserve.encode.rows import Rows, grids_of, places_of, spans_of, text_rows
from mmserve.encode.visual import Loaded, Media, MediaEncoder
from mmserve.encode.visual_tokens import Visual
from mmserve.errors import FailedPrecondition, InvalidArgument
from mmserve.models.base import EncoderModel
from mmserve.models.picture import VisionEncoder
from mmserve.prune import pruner_of
from mmserve.prune.base import judged_by_decoder
from mmserve.tiers.caches import Caches


@dataclass(frozen=True)
class LoadedPrompt:
    """A request's prompt before encoding: the chat's ids (int64), with one placeholder for each item of ``media``."""

    ids: np.ndarray
    media: Loaded

    def close(self) -> None:
        """Release its references to cache entries."""
        self.media.close()


class Encoder:
    """Encode of one model, and of its companion if a request's policy requires it; has no per-request state."""

    def __init__(
        self,
        model: EncoderModel,
        media: MediaConfig,
        *,
        max_tokens: int,
        cache: Caches | None = None,
        decoders: Decoders | None = None,
    ) -> None:
        self.model, self.max_tokens = model, max_tokens
        self.cache = cache or Caches.of(EncoderCacheConfig())
        self._media_encoder = MediaEncoder(model, media, self.cache, decoders)

    @torch.inference_mode()
    def load(self, request: Request, check: Check = lambda: None, arriving: Arriving | None = None) -> LoadedPrompt:
        """A request's prompt with its media read; to be closed after ``encode``. Runs the tower for long clips only.

        ``arriving``: receives a long clip, which must be the only media of the request, while it is read.

        Raises ``MMServeError`` subclasses for bad media, for prompts that are too long as soon as that is known, and
        the exceptions of ``check``, which is called between frames.
        """
        media, prompt = self._media(request), prompt_of(self.model, request)

        def admit(rows: list[int]) -> None:
            self._check_capacity(request, prompt, rows)

        progress = None if arriving is None else _Arrivals(self, request, prompt, media[0], arriving)
        return LoadedPrompt(prompt, self._media_encoder.load(media, admit, check, progress))

    def outline(self, request: Request, prompt: np.ndarray, item: Media, ids_R: np.ndarray) -> Encoded:
        """The prompt of a request with one clip, whose row is ``ids_R``, with zeros for its visual tokens."""
        model = self.model
        count = int((ids_R == VISUAL).sum())
        tokens = torch.zeros(count, model.width, dtype=model.dtype, device=model.device)
        result = Visual(tokens, ids_R, np.arange(len(ids_R)), np.full(count, -1), None, None)
        return self._splice(request, prompt, [(item, result)])

    @torch.inference_mode()
    def encode(
        self, batch: list[Request], loaded: Sequence[LoadedPrompt] | None = None, check: Check = lambda: None
    ) -> list[Encoded]:
        """Each request's prompt with its visual tokens; raises errors for bad media, and for prompts that are too long,
        without running a tower if the lengths are known in advance.

        ``loaded``: the results of ``load``; None = load them now. ``check`` is called between two items.
        """
        with ExitStack() as stack:
            if loaded is None:
                loaded = [stack.enter_context(closing(self.load(request, check))) for request in batch]
            asked = list(zip(batch, loaded, strict=True))

            def admit(rows: list[int]) -> None:
                left = iter(rows)
                for request, one in asked:
                    self._check_capacity(request, one.ids, [next(left) for _ in one.media.items])

            visuals = stack.enter_context(self._media_encoder.view([one.media for one in loaded], admit, check))
            result = iter(visuals)
            return [self._splice(r, one.ids, [(i, next(result)) for i in one.media.items]) for r, one in asked]

    @torch.inference_mode()
    def encode_shares(
        self, request: Request, chosen: Sequence[MediaShare], check: Check = lambda: None
    ) -> VisualPayload:
        """Visual tokens of the ``chosen`` media of a request, for another encoder.

        The files of the other media may be left out. Raises ``MMServeError`` subclasses for bad media.
        """
        every = self._media(request)

        def admit(_rows: list[int]) -> None:
            """Does nothing: lengths are checked where the prompt is assembled."""

        whole = [every[share.place] for share in chosen if share.of == 1]
        with ExitStack() as stack:
            loaded = stack.enter_context(closing(self._media_encoder.load(whole, admit, check)))
            entries = stack.enter_context(self._media_encoder.entries([loaded], admit, check))
            found: dict[str, Mapping[str, Tensor]] = {key.hex(): dict(entry) for key, entry in entries}
        for share in chosen:
            if share.of > 1:
                found |= self._media_encoder.part(every[share.place], share, check)
        return VisualPayload(found)

    @torch.inference_mode()
    def add_encoded(self, request: Request, payloads: Sequence[VisualPayload]) -> None:
        """Cache the results of ``encode_shares`` from other encoders for ``request``, so that ``load`` finds them;
        joins parts of clips."""
        whole: dict[str, Mapping[str, Tensor]] = {}
        parts: dict[str, dict[int, Mapping[str, Tensor]]] = defaultdict(dict)
        for payload in payloads:
            for name, entry in payload.entries.items():
                if (part := whole_of(name)) is None:
                    whole[name] = entry
                else:
                    parts[part[0]][part[1]] = entry
        media = self._media(request) if parts else []
        for name, of_clip in parts.items():
            if (joined := self._media_encoder.joined(media, name, of_clip)) is not None:
                whole[name] = joined
        for name, entry in whole.items():
            label = Label("visual", self.model.spec.name, request.tenant.cache, len(entry["tokens"]), name)
            self.cache.tokens.put(bytes.fromhex(name), entry, label)

    def _companion(self, request: Request) -> EncoderModel | None:
        """The companion, if the request's policy requires it."""
        return self.model.companion if request.diffusion.commit.name in ACCOMPANIED else None

    def _models(self, request: Request) -> list[EncoderModel]:
        """The models that encode a request's media: the served one and, if required, its companion."""
        companion = self._companion(request)
        return [self.model, *([companion] if companion is not None else [])]

    def _media(self, request: Request) -> list[Media]:
        """The request's images and videos, in order; raises ``FailedPrecondition`` if a model does not support them."""
        visions = [model.vision for model in self._models(request)]
        pruner, accompanied = pruner_of(request), len(visions) > 1
        pruner = None if judged_by_decoder(pruner) else pruner  # runs in prefill
        several = sum(isinstance(part, ImagePart) for _path, part in _parts(request)) > 1
        among = several and any(vision is not None and vision.tells_several for vision in visions)
        pixels = self._pixels(request, visions)
        found: list[Media] = []
        for path, part in _parts(request):
            match part:
                case ImagePart(data):
                    if any(vision is None for vision in visions):
                        raise self._unsupported_media(request, "images")
                    image = f"{path}.image", pruner, request.vision.amount, accompanied, among, request.tenant.cache
                    found.append(Media(data, False, *image, pixels))
                case VideoPart(data, sampling):
                    if self.model.spec.video_id is None or not all(v and v.frames_per_video for v in visions):
                        raise self._unsupported_media(request, "videos")
                    video = f"{path}.video", pruner, request.vision.amount, accompanied, False, request.tenant.cache
                    found.append(Media(data, True, *video, pixels, sampling))
        return found

    def _pixels(
        self, request: Request, visions: Sequence[VisionEncoder | None]
    ) -> tuple[PixelRange, PixelRange] | None:
        """The pixel limits of a request, None for the defaults; raises ``InvalidArgument`` if the model's are fixed, or
        they exceed those of its checkpoint."""
        asked = request.vision.images, request.vision.videos
        if asked == (PixelRange(), PixelRange()):
            return None
        for vision in visions:
            own = None if vision is None else vision.pixel_limits
            for stem, given, at in (("", asked[0], 0), ("video_", asked[1], 1)):
                for name, value in ((f"{stem}min_pixels", given.least), (f"{stem}max_pixels", given.most)):
                    if value is None:
                        continue
                    if own is None:
                        why = f"the model {self.model.spec.name!r} resizes pictures to a fixed size; leave it out"
                        raise InvalidArgument.of(f"vision.{name}", why)
                    most = own[at].most
                    if most is not None and value > most:
                        why = f"must be at most {most}, the checkpoint's own {stem}max_pixels, not {value}"
                        raise InvalidArgument.of(f"vision.{name}", why)
        return asked

    def _unsupported_media(self, request: Request, what: str) -> FailedPrecondition:
        name, companion = self.model.spec.name, self._companion(request)
        if companion is None:
            return FailedPrecondition(f"the model {name!r} takes no {what}; ask one that does")
        policy = request.diffusion.commit.name
        return FailedPrecondition(
            f"the model {name!r} or its companion {companion.spec.name!r}, which {policy!r} needs, takes no {what}"
        )

    def _rows(self, item: Media, result: Visual) -> Rows:
        """The rows of an image or a clip: its visual tokens after pruning, and the text between them."""
        placeholder = self.model.spec.video_id if item.clip else self.model.spec.image_id
        assert placeholder is not None
        ids = result.ids_R[result.places]
        visual = ids == VISUAL
        ids[visual] = placeholder
        grid = np.full(len(ids), -1)
        grid[visual] = result.grid_K
        places, span = result.places, len(result.ids_R)
        if result.where is not None:
            places, span = result.where[:, places], int(result.where[0, -1])
        pruned = len(result.ids_R) - len(ids)
        return Rows(ids, places, span, pruned, visual, grid, result.tokens_KD, result.companion_KD, item.clip)

    def _splice(self, request: Request, ids: np.ndarray, media: list[tuple[Media, Visual]]) -> Encoded:
        """The prompt, with each placeholder replaced by the rows of its image or video."""
        spec = self.model.spec
        images, videos = (
            [self._rows(item, result) for item, result in media if item.clip is clip] for clip in (False, True)
        )
        waiting: dict[int, Iterator[Rows]] = {}
        for placeholder, kind, one, rows in (
            (spec.image_id, "image", "an image", images),
            (spec.video_id, "video", "a video", videos),
        ):
            held = int((ids == placeholder).sum()) if placeholder is not None else 0
            if held > len(rows):
                why = f"the text has {held - len(rows)} {kind} placeholders without {one}"
                raise InvalidArgument.of("messages", why)
            if held < len(rows):
                raise _left_out(request, kind, one)
            if placeholder is not None:
                waiting[placeholder] = iter(rows)
        if (~np.isin(ids, list(waiting)) & (ids >= self.model.vocab_size)).any():
            raise InvalidArgument.of("messages", "the text has a placeholder of media that this model does not take")
        pieces: list[Rows] = []
        start = 0
        for place in np.flatnonzero(np.isin(ids, list(waiting))):
            pieces += [text_rows(ids[start:place]), next(waiting[int(ids[place])])]
            start = int(place) + 1
        pieces.append(text_rows(ids[start:]))
        spliced = np.concatenate([piece.ids for piece in pieces])
        if len(spliced) < max(m.spec.logit_shift for m in self._models(request)):
            raise InvalidArgument.of("messages", "the prompt has no token that an answer could follow")
        starts = np.cumsum([0, *(piece.span for piece in pieces)]).tolist()
        unpruned = judged_by_decoder(pruner_of(request)) and bool(media)
        before = max(starts[-1], len(spliced)) if unpruned else starts[-1]  # the decoder scores all rows
        self._check_length(request, 0 if unpruned else len(spliced), before)
        features = [piece.features for piece in pieces if piece.features is not None]
        visual = np.flatnonzero(np.concatenate([piece.visual for piece in pieces]))
        companion_features = [piece.companion_features for piece in pieces if piece.companion_features is not None]
        return Encoded(
            spliced,
            visual,
            torch.cat(features) if features else None,
            torch.cat(companion_features) if companion_features else None,
            places_of(pieces, starts),
            sum(piece.pruned for piece in pieces),
            spans_of(pieces, starts),
            grids_of(pieces) if unpruned else (),
        )

    def _check_capacity(self, request: Request, prompt: np.ndarray, media: list[int]) -> None:
        """Reject a prompt whose ids and ``media`` (rows of each item before pruning) are too many for any result of the
        tower.

        The number of rows after pruning is only known later; with several position axes, positions are as well.
        """
        text = len(prompt) - len(media)
        whole = text + sum(media)
        pruner = pruner_of(request)
        left = whole if pruner is None else text
        counted = self.model.position_axes == 1 or judged_by_decoder(pruner)
        self._check_length(request, left, whole if counted else text)

    def _check_length(self, request: Request, prompt: int, before: int) -> None:
        """Check the length after pruning (``prompt``) against the engine, and the one ``before`` against the models'
        positions."""
        positions = min(model.spec.max_tokens for model in self._models(request))
        new = answer_length(request, self.model)
        check_length(request, prompt, new, self.max_tokens)
        check_length(request, before, new, positions, pruned=before > prompt)


@dataclass(frozen=True)
class _Arrivals:
    """``clip_encoder.ClipProgress`` for one request."""

    encoder: Encoder
    request: Request
    prompt: np.ndarray
    item: Media
    arriving: Arriving

    def planned(self, ids_R: np.ndarray) -> None:
        self.arriving.begin(self.encoder.outline(self.request, self.prompt, self.item, ids_R))

    def arrived(self, tokens_kD: Tensor) -> None:
        self.arriving.add(tokens_kD)


def _parts(request: Request) -> Iterator[tuple[str, Part]]:
    """Every part with its path in the request message."""
    for m, message in enumerate(request.messages):
        for p, part in enumerate(message.parts):
            yield f"messages[{m}].parts[{p}]", part


def _left_out(request: Request, kind: str, one: str) -> InvalidArgument:
    """The error for an image or video that the chat template drops, or for one that the template adds."""
    wanted = ImagePart if kind == "image" else VideoPart
    roles = [message.role for message in request.messages for _part in message.parts]
    for role, (path, part) in zip(roles, _parts(request), strict=True):
        if isinstance(part, wanted) and role != "user":
            where = f"is in a message of the role {role!r}, where the model's chat template leaves out {one}"
            return InvalidArgument.of(f"{path}.{kind}", f"{where}: put it into a message of the user")
    return InvalidArgument.of(
        "messages", f"the model's chat format leaves out {one}: put it into a message of the user"
    )
