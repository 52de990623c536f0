"""The three stages of one model, joined by a transport: what the engine's workers run.

A stage takes a batch of requests and returns one outcome each: a small plain result, or the exception that this
request alone met. Payloads (visual tokens, pages, canvases) travel by the transport and never touch the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.config import EngineConfig, MediaConfig
from mmserve.core.events import CommittedToken, Usage
from mmserve.core.info import ModelInfo
from mmserve.core.request import Request, RequestId, TextPart
from mmserve.decode.commit import CAUSAL_COMMIT, DIFFUSION_COMMIT
from mmserve.decode.loop import DiffusionDecoder, Stepped, commit_policy, recompute_policy
from mmserve.decode.recompute import BLOCK_CAUSAL_ATTENTION, CAUSAL_ATTENTION, FULL_ATTENTION
from mmserve.decode.state import Decoding, Encoded, Prefilled, Prefilling
from mmserve.encode.encoder import Encoder
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.kv.store import KVStore
from mmserve.models.base import Attention, LoadedModel
from mmserve.transfer.base import Transport
from mmserve.transfer.local import LocalTransport
from mmserve.worker import run_isolated


@dataclass(frozen=True)
class Answer:
    """What came of a request that ended in decode; ``tokens`` only if it asked for them."""

    text: str
    completion_tokens: int
    forwards: int
    recomputed_tokens: int
    edits: int
    tokens: tuple[CommittedToken, ...]


class Stages:
    """Encode, prefill and decode of one model. Each method belongs to one worker; all may run at the same time."""

    def __init__(self, model: LoadedModel, engine: EngineConfig, media: MediaConfig) -> None:
        self.model, self._media = model, media
        self.max_tokens = min(engine.max_tokens, model.spec.max_tokens)
        self.store = KVStore(
            model.decoder.config, pages=engine.pages, page_size=engine.page_size, dtype=model.dtype, device=model.device
        )
        self.encoder = Encoder(model, media, max_tokens=self.max_tokens)
        self.decoder = DiffusionDecoder(model, self.store, chunk=engine.prefill_tokens)
        self.to_prefill: Transport = LocalTransport()
        self.to_decode: Transport = LocalTransport()
        self._prefilling: dict[RequestId, Prefilling] = {}
        self._decoding: dict[RequestId, Decoding] = {}
        self._longest_token = max(map(len, model.tokenizer.get_vocab()))

    def describe(self) -> ModelInfo:
        """What the model can do here."""
        sees = self.model.vision is not None
        frames = self.model.vision.frames_per_video if self.model.vision is not None else 0
        policies = self._recompute_policies
        return ModelInfo(
            name=self.model.spec.name,
            architecture=self.model.spec.architecture,
            images=sees,
            videos=bool(frames),
            diffusion=not self.model.spec.causal,
            recompute_policies=policies,
            commit_policies=self._commit_policies,
            max_tokens=self.max_tokens,
            max_images=self._media.max_images if sees else 0,
            visual_tokens_per_image=self.model.vision.tokens_per_image if self.model.vision is not None else 0,
            max_image_bytes=self._media.max_item_bytes,
            max_videos=self._media.max_videos if frames else 0,
            frames_per_video=frames,
            max_video_seconds=self._media.max_video_seconds if frames else 0.0,
            max_video_bytes=self._media.max_item_bytes if frames else 0,
            max_new_tokens=64,
            block_length=self.model.spec.block_length(),
            recompute_policy=policies[0],
            commit_policy="low_confidence",
            parameters=self.model.parameters,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self.model.device),
        )

    def check(self, request: Request) -> None:
        """Refuse at once what no stage could do.

        ``InvalidArgument`` for unknown policies, for blocks other than those of the model's attention, and for endless
        text: it is only tokenized in a stage, where megabytes of it would keep others waiting for seconds.
        ``Unimplemented`` for a policy that the model's kind of attention makes wrong.
        """
        recompute_policy(request)
        commit_policy(request)
        for kind, asked, allowed in (
            ("recompute", request.diffusion.recompute.name, self._recompute_policies),
            ("commit", request.diffusion.commit.name, self._commit_policies),
        ):
            if asked not in allowed:
                raise Unimplemented(
                    f"model {self.model.spec.name!r} has no {kind} policy {asked!r}; it has {', '.join(allowed)}"
                )
        block = self.model.spec.attention_block
        if block and request.diffusion.block_length not in (0, block):
            why = "one token after another" if block == 1 else f"blocks of {block}"
            raise InvalidArgument.of("diffusion.block_length", f"must be {block}: the model decodes {why}")
        characters = sum(len(p.text) for m in request.messages for p in m.parts if isinstance(p, TextPart))
        if characters > self.max_tokens * self._longest_token:
            raise InvalidArgument.of("messages", f"{characters} characters are more than {self.max_tokens} tokens hold")

    def encode(self, batch: list[Request]) -> list[Usage | BaseException]:
        """Encode each request; its token counts (no completion yet)."""
        outcomes = run_isolated(self.encoder.encode, batch)
        return [self._send_encoded(r, o) if isinstance(o, Encoded) else o for r, o in zip(batch, outcomes, strict=True)]

    def prefill(self, batch: list[tuple[Request, tuple[int, ...]]]) -> list[int | BaseException | None]:
        """Prefill each request into its pages, a long prompt by a chunk.

        None = done; a number = so many positions have been run, and some of the prompt is left.
        """
        opened = [outcome for item in batch for outcome in run_isolated(self._begin, [item])]
        ran = iter(run_isolated(self.decoder.prefill, [o for o in opened if not isinstance(o, BaseException)]))
        outcomes: list[int | BaseException | None] = []
        for (request, _pages), state in zip(batch, opened, strict=True):
            outcome = state if isinstance(state, BaseException) else next(ran)
            if isinstance(outcome, Prefilled):
                del self._prefilling[request.id]
                self.to_decode.send(request.id, outcome)
                outcomes.append(None)
            else:
                outcomes.append(self._prefilling[request.id].run if outcome is None else outcome)
        return outcomes

    def decode(self, batch: list[Request]) -> list[Stepped | BaseException]:
        """One step of each request."""
        opened = [outcome for request in batch for outcome in run_isolated(self._states, [request])]
        proposed = iter(run_isolated(self.decoder.propose, [s for s in opened if isinstance(s, Decoding)]))
        outcomes: list[Stepped | BaseException] = []
        for state in opened:
            if isinstance(state, BaseException):
                outcomes.append(state)
            elif (failure := next(proposed)) is not None:
                outcomes.append(failure)
            else:
                outcomes += run_isolated(self._commit, [state])
        return outcomes

    def finished(self, request: RequestId) -> Answer:
        """What came of a request that ended in decode."""
        state = self._decoding[request]
        tokens = self.decoder.tokens(state) if state.request.streaming.tokens else ()
        counts = (state.text.tokens, state.forwards, state.prefilled.recomputed, state.edits)
        return Answer(state.text.text, *counts, tokens)

    def release(self, request: RequestId) -> None:
        """Forget a request wherever it stands; its pages are the engine's to take back. Not while a stage runs it."""
        self.to_prefill.drop(request)
        self.to_decode.drop(request)
        self._prefilling.pop(request, None)
        self._decoding.pop(request, None)

    @property
    def held(self) -> int:
        """Requests of which anything is kept."""
        return self.to_prefill.waiting + len(self._prefilling) + self.to_decode.waiting + len(self._decoding)

    @property
    def _recompute_policies(self) -> tuple[str, ...]:
        return {
            Attention.FULL: FULL_ATTENTION,
            Attention.BLOCK_CAUSAL: BLOCK_CAUSAL_ATTENTION,
            Attention.CAUSAL: CAUSAL_ATTENTION,
        }[self.model.spec.attention]

    @property
    def _commit_policies(self) -> tuple[str, ...]:
        return CAUSAL_COMMIT if self.model.spec.causal else DIFFUSION_COMMIT

    def _send_encoded(self, request: Request, encoded: Encoded) -> Usage:
        self.to_prefill.send(request.id, encoded)
        return Usage(len(encoded.ids), len(encoded.image_rows), 0)

    def _begin(self, batch: list[tuple[Request, tuple[int, ...]]]) -> list[tuple[Request, Prefilling]]:
        for request, pages in batch:
            if request.id not in self._prefilling:
                encoded = self.to_prefill.receive(request.id)
                self._prefilling[request.id] = self.decoder.begin(request, encoded, np.asarray(pages, dtype=np.int64))
        return [(request, self._prefilling[request.id]) for request, _pages in batch]

    def _states(self, requests: list[Request]) -> list[Decoding]:
        for request in requests:
            if request.id not in self._decoding:
                self._decoding[request.id] = self.decoder.open(request, self.to_decode.receive(request.id))
        return [self._decoding[request.id] for request in requests]

    def _commit(self, states: list[Decoding]) -> list[Stepped]:
        return [self.decoder.commit(state) for state in states]
