"""The three stages of one model in one process: what the engine's workers run.

A stage takes a batch of requests and returns one outcome each: a small plain result, or the exception that this
request alone met. Payloads (visual tokens, pages, canvases) travel by the transports and never touch the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mmserve.capabilities import Capabilities
from mmserve.config import EngineConfig, MediaConfig
from mmserve.core.cancellation import Cancellation
from mmserve.core.encoded import Encoded
from mmserve.core.info import ModelInfo
from mmserve.core.request import Request, RequestId
from mmserve.decode.policies import Offered
from mmserve.decode.schedulers import Discrete
from mmserve.decode.state import Answer, Stepped
from mmserve.decoders import decoder_for
from mmserve.encode.cache import EncoderCache
from mmserve.encode.decoding import DecodePool, Decoders
from mmserve.kv.store import KVStore
from mmserve.kv.table import PageTable
from mmserve.models.base import CanvasModel, Model
from mmserve.stages.decode import DecodeStage
from mmserve.stages.encode import EncodeStage, Tell
from mmserve.stages.prefill import Outcome, PrefillStage
from mmserve.stages.prompt import EncodedPrompt
from mmserve.transfer.base import Transport
from mmserve.transfer.local import LocalTransport


class Stages:
    """Encode, prefill and decode of one model, over one store. Each method belongs to one worker; all may run at the
    same time, and ``constrain`` more than once.

    ``to_prefill`` and ``to_decode`` join the stages; None = by reference.
    """

    def __init__(
        self,
        model: Model,
        engine: EngineConfig,
        media: MediaConfig,
        schedulers: Mapping[str, Discrete] = MappingProxyType({}),
        cache: EncoderCache | None = None,
        decoders: Decoders | None = None,
        *,
        to_prefill: Transport | None = None,
        to_decode: Transport | None = None,
    ) -> None:
        self.model = model
        offered = Offered.by(model, schedulers)
        self.capabilities = Capabilities(model, engine, media, offered)
        self.decoders = decoders or DecodePool(media)
        self.decoders.open()
        self.to_prefill: Transport = to_prefill or LocalTransport()
        self.to_decode: Transport = to_decode or LocalTransport()
        most = self.capabilities.max_tokens
        self.encoding = EncodeStage(
            model, engine, media, self.to_prefill, max_tokens=most, decoders=self.decoders, cache=cache
        )
        self.encoder, self.shared_pages = self.encoding.encoder, self.encoding.summaries.shared_pages
        # Two kinds of decoder whose states differ and never meet: what one began it alone goes on with.
        self.decoder: Any = decoder_for(model, engine, offered, self.encoder.cache.kv)
        self.prefilling = PrefillStage(
            model, self.decoder, self.encoding.summaries, self.to_prefill, self.to_decode, max_tokens=most
        )
        self.decoding = DecodeStage(model, self.decoder, self.to_decode)

    def describe(self) -> ModelInfo:
        """What the model can do here."""
        return self.capabilities.describe({} if isinstance(self.model, CanvasModel) else self.store.kernels)

    def check(self, request: Request) -> None:
        """Refuse at once what no stage could do, as ``Capabilities.check`` says."""
        self.capabilities.check(request)

    def give(self, request: RequestId, prompt: Encoded) -> None:
        """As ``EncodeStage.give``."""
        self.encoding.give(request, prompt)

    def constrain(self, batch: list[Request]) -> list[BaseException | None]:
        """As ``EncodeStage.constrain``."""
        return self.encoding.constrain(batch)

    def load(
        self, batch: list[Request], cancellation: Cancellation, tell: Tell = lambda _prompt, _rows: None
    ) -> list[EncodedPrompt | BaseException | None]:
        """As ``EncodeStage.load``."""
        return self.encoding.load(batch, cancellation, tell)

    def encode(self, batch: list[Request]) -> list[EncodedPrompt | BaseException]:
        """As ``EncodeStage.encode``."""
        return self.encoding.encode(batch)

    def give_way(self, prefill: Callable[[], None], decode: Callable[[], None]) -> None:
        """Have long passes call these between their layers, each on its stage's thread; before the first request."""
        self.decoder.give_way(prefill, decode)

    def prefill(self, batch: list[tuple[Request, PageTable]]) -> list[Outcome]:
        """As ``PrefillStage.prefill``."""
        return self.prefilling.prefill(batch)

    def forget_prefill(self, request: RequestId) -> None:
        """Drop what was prefilled of a prompt that turned out to be another; not while a stage runs it."""
        self.prefilling.forget(request)

    def decode(self, batch: list[Request]) -> list[Stepped | BaseException]:
        """As ``DecodeStage.decode``."""
        return self.decoding.decode(batch)

    def finished(self, request: RequestId) -> Answer:
        """As ``DecodeStage.finished``."""
        return self.decoding.finished(request)

    def release(self, request: RequestId) -> None:
        """Forget a request in whichever stage it is; its pages are the engine's to take back. Not while a stage runs
        it."""
        self.encoding.release(request)
        self.prefilling.forget(request)
        self.decoding.release(request)

    def warm(self) -> None:
        """As ``EncodeStage.warm``."""
        self.encoding.warm()

    def close(self) -> None:
        """End what runs beside the stages, and what waits for it; from any thread, and more than once."""
        self.encoding.close()

    def stop(self) -> None:
        """Give back what decodes media; after the last request."""
        self.decoders.close()

    @property
    def held(self) -> int:
        """Requests of which anything is kept."""
        waiting = self.to_prefill.waiting + self.to_decode.waiting
        return waiting + self.encoding.held + self.prefilling.held + self.decoding.held

    @property
    def store(self) -> KVStore:
        """Where the decoder keeps K/V; a renoising model's network keeps its own, and has none."""
        store: KVStore = self.decoder.parts.store
        return store
