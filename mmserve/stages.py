"""The three stages of one model, joined by a transport: what the engine's workers run.

A stage takes a batch of requests and returns one outcome each: a small plain result, or the exception that this
request alone met. Payloads (visual tokens, pages, canvases) travel by the transport and never touch the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from mmserve.capabilities import Capabilities
from mmserve.config import EngineConfig, MediaConfig
from mmserve.constraint.admission import Admission
from mmserve.constraint.session.session import Session
from mmserve.core.cancellation import Cancellation
from mmserve.core.events import Usage
from mmserve.core.info import ModelInfo
from mmserve.core.isolation import run_isolated
from mmserve.core.request import Request, RequestId, TextPart, VideoPart
from mmserve.core.samples import samples
from mmserve.core.tuning import ACCOMPANIED
from mmserve.decode.extensions.constraint import Constraint
from mmserve.decode.extensions.image_reuse.checks import reused
from mmserve.decode.extensions.image_reuse.reuse import ImageKVReuse
from mmserve.decode.policies import Offered
from mmserve.decode.recompute import KEEPS_PROMPT
from mmserve.decode.schedulers import Discrete
from mmserve.decode.state import Answer, Stepped, extension_of
from mmserve.decode.step import step
from mmserve.decoders import decoder_for
from mmserve.encode.arriving import Arriving
from mmserve.encode.cache import EncoderCache
from mmserve.encode.decoding import DecodePool, Decoders
from mmserve.encode.embedding import place_features
from mmserve.encode.encoded import Encoded
from mmserve.encode.encoder import Encoder, LoadedPrompt
from mmserve.kv.prefix import page_keys, pages_a_unit
from mmserve.kv.reuse import reuse_of
from mmserve.kv.store import KVStore
from mmserve.kv.table import PageTable
from mmserve.memory import trim_soon
from mmserve.models.base import CanvasModel, LoadedModel, Model
from mmserve.transfer.base import Transport
from mmserve.transfer.local import LocalTransport


@dataclass(frozen=True)
class EncodedPrompt:
    """What the engine learns of a prompt in encode: its token counts, and the keys of its pages that may be shared."""

    usage: Usage
    keys: tuple[bytes, ...]


#: Called with the prompt of a request that is prefilled while its clip is read, then None; and the count of final rows.
Tell = Callable[[EncodedPrompt | None, int], None]


class Stages:
    """Encode, prefill and decode of one model. Each method belongs to one worker; all may run at the same time, and
    ``constrain`` more than once."""

    def __init__(
        self,
        model: Model,
        engine: EngineConfig,
        media: MediaConfig,
        schedulers: Mapping[str, Discrete] = MappingProxyType({}),
        cache: EncoderCache | None = None,
        decoders: Decoders | None = None,
    ) -> None:
        self.model = model
        offered = Offered.by(model, schedulers)
        self.capabilities = Capabilities(model, engine, media, offered)
        self.decoders = decoders or DecodePool(media)
        self.decoders.open()
        self.encoder = Encoder(
            model,
            media,
            max_tokens=self.capabilities.max_tokens,
            cache=cache,
            decoders=self.decoders,
        )
        self._loaded: dict[RequestId, tuple[LoadedPrompt, Cancellation]] = {}
        self._arriving: dict[RequestId, Arriving] = {}  # prompts that are prefilled while their clips are read
        self._prefill_rows = engine.prefill_tokens
        self._given: dict[RequestId, Encoded] = {}  # prompts that came encoded
        # Two kinds of decoder whose states differ and never meet: what one began it alone goes on with.
        self.decoder: Any = decoder_for(model, engine, offered, self.encoder.cache.kv)
        # Chunks that begin within a page would make its last bits depend on where a request began to run.
        whole_pages = not model.spec.causal or not 0 < engine.prefill_tokens < engine.page_size
        # A renoising model's network keeps its K/V to itself: nothing is ever written to the pages of its requests.
        paged = model.spec.renoising is None and model.spec.attention_block is not None
        self._shares = engine.prefix_cache and paged and whole_pages
        self.shared_pages = pages_a_unit(engine.page_size, model.spec.attention_block or 1)  # at once
        self.to_prefill: Transport = LocalTransport()
        self.to_decode: Transport = LocalTransport()
        self._admission = Admission(model)
        self._admitted: dict[RequestId, list[Session]] = {}  # for each sample that waits
        self.constraint_steps = self.constraint_fallbacks = self.constraint_late = 0  # of requests that ended
        self._prefilling: dict[RequestId, Any] = {}
        self._decoding: dict[RequestId, Any] = {}

    def describe(self) -> ModelInfo:
        """What the model can do here."""
        return self.capabilities.describe({} if isinstance(self.model, CanvasModel) else self.store.kernels)

    def check(self, request: Request) -> None:
        """Refuse at once what no stage could do, as ``Capabilities.check`` says."""
        self.capabilities.check(request)

    def give(self, request: RequestId, prompt: Encoded) -> None:
        """The prompt of a request that is about to be submitted; encode then reads no message of it."""
        self._given[request] = prompt

    def constrain(self, batch: list[Request]) -> list[BaseException | None]:
        """Make each request's constraint ready, or say why it cannot be kept."""
        return run_isolated(self._admit, batch)

    def load(
        self, batch: list[Request], cancellation: Cancellation, tell: Tell = lambda _prompt, _rows: None
    ) -> list[EncodedPrompt | BaseException | None]:
        """Read the media of a request, which ``cancellation`` ends between two frames.

        The prompt of a next-token model with a long clip may be prefilled meanwhile: then ``tell`` is told of it first,
        and later of how many of its rows are final. Such a request is encoded in the end, and its prompt returned; None
        where it is only loaded, in spite of what was told.
        """

        def load(requests: list[Request]) -> list[EncodedPrompt | None]:
            [request] = requests
            arriving = self._arriving_of(request, tell) if self._overlaps(request) else None
            loaded = self.encoder.load(request, cancellation.check, arriving)
            if arriving is not None and arriving.encoded is not None:
                with closing(loaded):
                    [encoded] = self.encoder.encode([request], [loaded], cancellation.check)
                    if arriving.complete(encoded):
                        return [self._prompt(request, arriving.encoded)]
                loaded = self.encoder.load(request, cancellation.check)
            self._loaded[request.id] = loaded, cancellation
            return [None]

        return run_isolated(load, batch)

    def forget_prefill(self, request: RequestId) -> None:
        """Drop what was prefilled of a prompt that turned out to be another; not while a stage runs it."""
        self._arriving.pop(request, None)
        self.to_prefill.drop(request)
        self._prefilling.pop(request, None)

    def encode(self, batch: list[Request]) -> list[EncodedPrompt | BaseException]:
        """Encode each request, once for all of its samples; what the engine must know of its prompt."""
        together = self.model.device.type != "cpu"  # only there does that save time
        batches = [batch] if together else [[request] for request in batch]
        outcomes = [outcome for each in batches for outcome in run_isolated(self._encoded, each)]
        for request in batch:
            self._unload(request.id)
        return [self._send_encoded(r, o) if isinstance(o, Encoded) else o for r, o in zip(batch, outcomes, strict=True)]

    def give_way(self, prefill: Callable[[], None], decode: Callable[[], None]) -> None:
        """Have long passes call these between their layers, each on its stage's thread; before the first request."""
        self.decoder.give_way(prefill, decode)

    def prefill(self, batch: list[tuple[Request, PageTable]]) -> list[int | BaseException | None]:
        """Prefill each request into its pages, a long prompt by a chunk.

        None = done; a number = so many positions have been run, and some of the prompt is left.
        """
        opened = [outcome for item in batch for outcome in run_isolated(self._begin, [item])]
        ready = [o for o in opened if o is not None and not isinstance(o, BaseException)]
        ran = iter(run_isolated(self.decoder.prefill, ready))
        outcomes: list[int | BaseException | None] = []
        for (request, _pages), state in zip(batch, opened, strict=True):
            outcome = state if state is None or isinstance(state, BaseException) else next(ran)
            if isinstance(outcome, BaseException):
                outcomes.append(outcome)
            elif outcome is None:
                outcomes.append(self._prefilling[request.id].run)
            else:
                del self._prefilling[request.id]
                self._arriving.pop(request.id, None)
                self.to_decode.send(request.id, outcome)
                outcomes.append(None)
        return outcomes

    def decode(self, batch: list[Request]) -> list[Stepped | BaseException]:
        """One step of each request."""
        opened = [outcome for request in batch for outcome in run_isolated(self._states, [request])]
        made = iter(step(self.decoder, [state for state in opened if not isinstance(state, BaseException)]))
        return [state if isinstance(state, BaseException) else next(made) for state in opened]

    def finished(self, request: RequestId) -> Answer:
        """What came of a request that ended in decode."""
        answer: Answer = self.decoder.answer(self._decoding[request])
        return answer

    def release(self, request: RequestId) -> None:
        """Forget a request wherever it stands; its pages are the engine's to take back. Not while a stage runs it."""
        self._admitted.pop(request, None)
        self._unload(request)
        self.to_prefill.drop(request)
        self.to_decode.drop(request)
        self._prefilling.pop(request, None)
        self._arriving.pop(request, None)
        ended = self._decoding.pop(request, None)
        constraint = None if ended is None else extension_of(ended.extensions, Constraint)
        if constraint is not None:
            took = constraint.session.stats.report()
            self.constraint_steps += took.steps
            self.constraint_fallbacks += took.fallbacks
            self.constraint_late += took.late
            trim_soon()  # its parsers have gone

    def warm(self) -> None:
        """Make ready what the first constrained request would wait for: seconds. Blocks, for less than that."""
        self._admission.warm()

    def close(self) -> None:
        """End what runs beside the stages, and what waits for it; from any thread, and more than once."""
        self._admission.close()

    def stop(self) -> None:
        """Give back what decodes media; after the last request."""
        self.decoders.close()

    @property
    def held(self) -> int:
        """Requests of which anything is kept."""
        waiting = len(self._admitted) + len(self._loaded) + len(self._given)
        waiting += self.to_prefill.waiting + self.to_decode.waiting
        return waiting + len(self._prefilling) + len(self._decoding) + len(self._arriving)

    @property
    def store(self) -> KVStore:
        """Where the decoder keeps K/V; a renoising model's network keeps its own, and has none."""
        store: KVStore = self.decoder.parts.store
        return store

    def _admit(self, batch: list[Request]) -> list[None]:
        for request in batch:
            assert request.constraint is not None
            sampling = request.sampling
            self._admitted[request.id] = self._admission.admit(
                request.constraint,
                sampling.max_new_tokens,
                sampling.n,
                request.tenant.cache,
                speculates=sampling.repetition_penalty == 1,
            )
        return [None] * len(batch)

    def _encoded(self, batch: list[Request]) -> list[Encoded]:
        given = [r for r in batch if r.id in self._given]
        others = [r for r in batch if r.id not in self._given]
        found = [self._loaded.get(request.id) for request in others]
        loaded = [one[0] for one in found if one is not None]

        def check() -> None:
            for one in found:
                if one is not None:
                    one[1].check()

        check()
        whole = loaded if len(loaded) == len(others) else None
        made = dict(zip((r.id for r in others), self.encoder.encode(others, whole, check), strict=True))
        made |= {r.id: self._given[r.id] for r in given}
        return [
            replace(one, span_keys=self._span_keys(one, request.tenant.cache))
            if reused(reuse_of(request), one)
            else one
            for request, one in ((request, made[request.id]) for request in batch)
        ]

    def _span_keys(self, encoded: Encoded, cache: str) -> tuple[bytes, ...]:
        reuse: ImageKVReuse | None = self.decoder.parts.extension(ImageKVReuse)
        return () if reuse is None else reuse.keys(encoded, cache)

    def _unload(self, request: RequestId) -> None:
        self._given.pop(request, None)
        found = self._loaded.pop(request, None)
        if found is not None:
            found[0].close()

    def _send_encoded(self, request: Request, encoded: Encoded) -> EncodedPrompt:
        shares = self._may_share(request) and encoded.past is None  # such K/V come from another prompt
        keys = self._keys(encoded, request.tenant.cache) if shares else ()
        taken = reused(reuse_of(request), encoded) if encoded.past is None else len(encoded.past.rows)
        if encoded.past is None and taken:  # what stands behind an image that was not run is of this request alone
            keys = keys[: encoded.spans[0].start // self.store.page_size]
        admitted = self._admitted.pop(request.id, None)
        for i, sample in enumerate(samples(request)):  # what stands in the prompt is read, never changed
            self.to_prefill.send(sample.id, encoded)
            if admitted is not None:
                self._admitted[sample.id] = admitted[i : i + 1]
        rows, visual = len(encoded.ids), len(encoded.image_rows)
        usage = Usage(rows, visual, 0, visual_tokens_before=visual + encoded.pruned, reused_tokens=taken)
        return EncodedPrompt(usage, keys)

    def _may_share(self, request: Request) -> bool:
        keeps = request.diffusion.recompute.name in KEEPS_PROMPT and request.kv_reduction is None
        return self._shares and keeps

    def _overlaps(self, request: Request) -> bool:
        """Whether the prompt may be prefilled while its clip is read: nothing in it depends on what comes later."""
        model = self.model
        if isinstance(model, CanvasModel) or not model.spec.causal or model.decoder.config.deep_layers:
            return False
        media = [p for m in request.messages for p in m.parts if not isinstance(p, TextPart)]
        plain = request.kv_reduction is None and request.image_reuse is None and request.constraint is None
        plain &= request.vision.pruner == "none" and request.diffusion.commit.name not in ACCOMPANIED
        one = request.sampling.n == 1 and request.id not in self._given and self._prefill_rows > 0
        return plain and one and len(media) == 1 and isinstance(media[0], VideoPart) and model.position_axes == 1

    def _arriving_of(self, request: Request, tell: Tell) -> Arriving:
        def begun(encoded: Encoded) -> None:
            self._arriving[request.id] = arriving
            self.to_prefill.send(request.id, encoded)
            text = int(encoded.image_rows[0])
            prompt = self._prompt(request, encoded)
            tell(replace(prompt, keys=prompt.keys[: text // self.store.page_size]), text)

        arriving = Arriving(begun, lambda rows: tell(None, rows))
        return arriving

    def _prompt(self, request: Request, encoded: Encoded) -> EncodedPrompt:
        """What the engine learns of a prompt that nothing was dropped from."""
        rows, visual = len(encoded.ids), len(encoded.image_rows)
        keys = self._keys(encoded, request.tenant.cache) if self._may_share(request) else ()
        return EncodedPrompt(Usage(rows, visual, 0, visual_tokens_before=visual), keys)

    def _keys(self, encoded: Encoded, cache: str) -> tuple[bytes, ...]:
        """Hashed here and not where pages are taken: the engine's thread has no time for megabytes of features."""
        spec = self.model.spec
        features = encoded.features
        return page_keys(
            encoded.ids,
            encoded.image_rows,
            None if features is None else features.contiguous().view(torch.uint8).cpu().numpy(),
            encoded.places,
            page_size=self.store.page_size,
            block=spec.attention_block or 1,
            logit_shift=spec.logit_shift,
            cache=cache,
        )

    def _begin(self, batch: list[tuple[Request, PageTable]]) -> list[tuple[Request, Any] | None]:
        """The prefill state of each request; None where something comes before its first pass, and is not yet done."""
        found: list[tuple[Request, Any] | None] = []
        for request, pages in batch:
            if request.id not in self._prefilling:
                encoded = self.to_prefill.receive(request.id)
                [admitted] = self._admitted.pop(request.id, [None])
                self._prefilling[request.id] = self.decoder.begin(request, encoded, pages, admitted)
            state = self._prefilling[request.id]
            self._place_new(request.id, state)
            found.append((request, state) if self.decoder.ready(state) else None)
        return found

    @torch.inference_mode()
    def _place_new(self, request: RequestId, state: Any) -> None:
        """Take over the visual tokens that came since the last chunk."""
        arriving = self._arriving.get(request)
        new = None if arriving is None else arriving.fetch()
        if new is not None and isinstance(self.model, LoadedModel):
            place_features(self.model, state.embeddings, *new)

    def _states(self, requests: list[Request]) -> list[Any]:
        for request in requests:
            if request.id not in self._decoding:
                self._decoding[request.id] = self.decoder.open(request, self.to_decode.receive(request.id))
        return [self._decoding[request.id] for request in requests]
