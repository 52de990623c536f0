"""The three stages of one model in one process, as run by the engine's workers.

A stage takes a batch of requests and returns one outcome each: a small plain result, or the exception of this request.
Payloads (visual tokens, pages, canvases) are passed by the transports and not by the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from mmserve.capabilities import Capabilities
from mmserve.config import EngineConfig, MediaConfig
from mmserve.core.branches import branch_capacity
from mmserve.core.info import ModelInfo
from mmserve.core.payloads import CanvasPayload, EncodedPayload, PrefilledPayload
from mmserve.core.request import Request, RequestId
from mmserve.decode.policies import Offered
from mmserve.decode.schedulers import Discrete
from mmserve.decoders import decoder_for
from mmserve.encode.decoders import Decoders
from mmserve.encode.decoding import DecodePool
from mmserve.kv.prefix_tier import PrefixTier, decoder_digest, fingerprint
from mmserve.kv.store import KVStore
from mmserve.models.adapters import Adapters
from mmserve.models.base import CanvasModel, LoadedModel, Model
from mmserve.models.decisions import questions_ids
from mmserve.stages.decode import DecodeStage
from mmserve.stages.encode import EncodeStage
from mmserve.stages.prefill import PrefillStage
from mmserve.stages.prompt import plain_prompt
from mmserve.tiers.caches import Caches
from mmserve.transfer.base import Transport
from mmserve.transfer.local import LocalTransport


class Stages:
    """Encode, prefill and decode of one model, over one store.

    ``encoding``, ``prefilling`` and ``decoding`` are the stages, each with its own workers; all may run concurrently.
    ``to_prefill`` and ``to_decode`` connect them; None = by reference.
    """

    def __init__(
        self,
        model: Model,
        engine: EngineConfig,
        media: MediaConfig,
        schedulers: Mapping[str, Discrete] = MappingProxyType({}),
        cache: Caches | None = None,
        decoders: Decoders | None = None,
        *,
        to_prefill: Transport | None = None,
        to_decode: Transport | None = None,
    ) -> None:
        self.model, self._page_size = model, engine.page_size
        offered = Offered.by(model, schedulers)
        self.capabilities = Capabilities(model, engine, media, offered)
        self.adapters = Adapters(model, folder=engine.adapter_folder, most=engine.adapter_bytes)
        self.adapters.load_own()
        self.decoders = decoders or DecodePool(media)
        self.decoders.open()
        self.to_prefill: Transport = to_prefill or LocalTransport()
        self.to_decode: Transport = to_decode or LocalTransport()
        most = self.capabilities.max_tokens
        self.encoding = EncodeStage(
            model, engine, media, self.to_prefill, max_tokens=most, decoders=self.decoders, cache=cache
        )
        self.encoder, self.shared_pages = self.encoding.encoder, self.encoding.summaries.shared_pages
        # Two kinds of decoder with different states: a request stays with the decoder that began it.
        caches = self.encoder.cache
        shares = self.encoding.summaries.shares and caches.prefix.room > 0
        made_by = decoder_digest(model) if shares and isinstance(model, LoadedModel) else b""
        self.decoder: Any = decoder_for(model, engine, offered, caches.kv, self.adapters)
        self.tier = (
            PrefixTier(model.spec.name, self.store, caches.prefix, fingerprint(made_by, engine, self.store))
            if made_by
            else None
        )
        self.prefilling = PrefillStage(
            model, self.decoder, self.encoding.summaries, self.to_prefill, self.to_decode, self.tier, max_tokens=most
        )
        self.decoding = DecodeStage(model, self.decoder, self.to_decode)

    def describe(self) -> ModelInfo:
        """The capabilities of the model."""
        return self.capabilities.describe({} if isinstance(self.model, CanvasModel) else self.store.kernels)

    def resolved(self, request: Request) -> Request:
        """``request`` with the key of its adapter, and with the new tokens of its typed questions' branches as its
        length.

        Raises as ``Adapters.resolved`` and ``models.decisions.questions_ids`` do.
        """
        request, spec = self.adapters.resolved(request), self.model.spec
        if not request.decisions or spec.renoising is not None:
            return request
        asked = questions_ids(self.model.tokenizer, request.decisions, special_tokens=spec.special_tokens)
        room = branch_capacity(asked.lengths, self._page_size, spec.attention_block)
        return replace(request, sampling=replace(request.sampling, max_new_tokens=room))

    def encoded_payload(self, request: RequestId) -> EncodedPayload:
        """Remove a request that waits for prefill, and return its state as plain data.

        Raises ``Unimplemented`` if its state cannot be serialized, and then leaves it.
        """
        prompt = self.prefilling.waiting(request)
        payload = prompt if isinstance(prompt, EncodedPayload) else plain_prompt(prompt)
        self.prefilling.discard(request)
        return payload

    def prefilled_payload(self, request: RequestId) -> PrefilledPayload | CanvasPayload:
        """The same for a request that waits for its first decode step."""
        state = self.to_decode.receive(request)
        if isinstance(state, PrefilledPayload | CanvasPayload):
            return self.decoding.whole(request, state)
        try:
            payload: PrefilledPayload | CanvasPayload = self.decoder.payload(state)
        except BaseException:
            self.to_decode.send(request, state)
            raise
        return payload

    def live_payload(self, request: RequestId) -> CanvasPayload:
        """A copy of the state of a request between two decode steps; to be called in the thread of decode."""
        payload: CanvasPayload = self.decoder.payload(self.decoding.live[request])
        return payload

    def release(self, request: RequestId) -> None:
        """Forget a request in every stage; the engine releases its pages. Not while a stage runs it."""
        with ExitStack() as ending:  # all of it, whatever one of them raises
            ending.callback(self.adapters.release, request)
            ending.callback(self.decoding.release, request)
            ending.callback(self.prefilling.discard, request)
            self.encoding.release(request)

    @property
    def held(self) -> int:
        """Number of requests with state in any stage."""
        waiting = self.to_prefill.waiting + self.to_decode.waiting
        return waiting + self.encoding.held + self.prefilling.held + self.decoding.held + self.adapters.kept

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of the store."""
        if isinstance(self.model, CanvasModel):
            return 0
        return sum(tensor.nbytes for tensor in self.store.read_pages(np.zeros(1, np.int64)).values())

    @property
    def store(self) -> KVStore:
        """The decoder's K/V store; none for a renoising model, whose network has its own."""
        store: KVStore = self.decoder.parts.store
        return store
