"""The three stages of one model, joined by a transport: what the engine's workers run.

A stage takes a batch of requests and returns one outcome each: a small plain result, or the exception that this
request alone met. Payloads (visual tokens, pages, canvases) travel by the transport and never touch the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from mmserve.config import EngineConfig, MediaConfig
from mmserve.core.constraint import Template
from mmserve.core.events import CommittedToken, ConstraintStats, Usage
from mmserve.core.info import ModelInfo, lacking
from mmserve.core.request import Request, RequestId, TextPart
from mmserve.core.samples import samples
from mmserve.decode.blending import Blender, check_reuse, reused
from mmserve.decode.commit import (
    ACCOMPANIED,
    CAUSAL_COMMIT,
    DIFFUSION_COMMIT,
    DRAFTING,
    FILTERED,
    RENOISING_COMMIT,
)
from mmserve.decode.companion import Companion
from mmserve.decode.constrained.admission import Admission, Admitted
from mmserve.decode.constrained.sampling import check_sampling
from mmserve.decode.constrained.state import known_tokens
from mmserve.decode.graphs import graphs_for
from mmserve.decode.loop import DiffusionDecoder
from mmserve.decode.policies import Offered, commit_policy, exists, recompute_policy
from mmserve.decode.recompute import (
    BLOCK_CAUSAL_ATTENTION,
    CAUSAL_ATTENTION,
    FULL_ATTENTION,
    KEEPS_PROMPT,
    RENOISING,
)
from mmserve.decode.renoise import CanvasDecoder, check_renoising
from mmserve.decode.schedulers import Discrete
from mmserve.decode.state import Encoded, Stepped
from mmserve.encode.cache import EncoderCache, TensorCache
from mmserve.encode.encoder import Encoder
from mmserve.errors import ConfigError, InvalidArgument, Unimplemented
from mmserve.kv.prefix import page_keys, pages_a_unit
from mmserve.kv.quantized import QuantizedStore
from mmserve.kv.reduction import REDUCTIONS, reduction_of
from mmserve.kv.reuse import REUSES, reuse_of
from mmserve.kv.room import check_room, free_bytes, pool_bytes
from mmserve.kv.sparse import Sparse
from mmserve.kv.store import KVStore
from mmserve.kv.table import PageTable
from mmserve.models.attended import shown_by
from mmserve.models.base import Attention, CanvasModel, LoadedModel, Model
from mmserve.prune import pruner_of, pruners_for
from mmserve.transfer.base import Transport
from mmserve.transfer.local import LocalTransport
from mmserve.worker import run_isolated

#: Tokens of an answer where a request does not say how many.
DEFAULT_NEW_TOKENS = 64


@dataclass(frozen=True)
class EncodedPrompt:
    """What the engine learns of a prompt in encode: its token counts, and the keys of its pages that may be shared."""

    usage: Usage
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class Answer:
    """What came of a request that ended in decode; ``tokens`` only if it asked for them."""

    text: str
    completion_tokens: int
    forwards: int
    recomputed_tokens: int
    edits: int
    kv_positions: int
    tokens: tuple[CommittedToken, ...]
    companion_forwards: int
    warnings: tuple[str, ...] = ()
    closed_by_budget: bool = False
    log_weight: float | None = None
    constraint: ConstraintStats | None = None
    holes: tuple[str, ...] = ()  # of a template


class Stages:
    """Encode, prefill and decode of one model. Each method belongs to one worker; all may run at the same time."""

    def __init__(
        self,
        model: Model,
        engine: EngineConfig,
        media: MediaConfig,
        schedulers: Mapping[str, Discrete] = MappingProxyType({}),
        cache: EncoderCache | None = None,
    ) -> None:
        self.model, self._media = model, media
        models = [model, *([model.companion] if model.companion is not None else [])]
        self.max_tokens = min([engine.max_tokens, *(m.spec.max_tokens for m in models)])
        self._offered = Offered.by(model, schedulers)
        self.encoder = Encoder(model, media, max_tokens=self.max_tokens, cache=cache)
        # Two kinds of decoder whose states differ and never meet: what one began it alone goes on with.
        self.decoder: Any = _decoder(model, engine, self._offered, self.encoder.cache.kv)
        # Chunks that begin within a page would make its last bits depend on where a request began to run.
        whole_pages = not model.spec.causal or not 0 < engine.prefill_tokens < engine.page_size
        # A renoising model's network keeps its K/V to itself: nothing is ever written to the pages of its requests.
        paged = model.spec.renoising is None and model.spec.attention_block is not None
        # A reduction moves keys and values as they are, and every one it leaves is read.
        self._reducible = not (engine.sparse_prefill or engine.sparse_decode or engine.kv_bits)
        self._drafts = not engine.sparse_prefill and _rows_apart(engine)
        self._shares = engine.prefix_cache and paged and whole_pages
        self.shared_pages = pages_a_unit(engine.page_size, model.spec.attention_block or 1)  # at once
        self.to_prefill: Transport = LocalTransport()
        self.to_decode: Transport = LocalTransport()
        self._admission = Admission(model)
        self._admitted: dict[RequestId, Admitted] = {}
        self.constraint_steps = self.constraint_fallbacks = self.constraint_late = 0  # of requests that ended
        self._prefilling: dict[RequestId, Any] = {}
        self._decoding: dict[RequestId, Any] = {}
        self._longest_token = max(map(len, model.tokenizer.get_vocab()))

    def describe(self) -> ModelInfo:
        """What the model can do here."""
        sees = self.model.vision is not None
        frames = self.model.vision.frames_per_video if self.model.vision is not None else 0
        policies = self._recompute_policies
        an_image = self.model.vision.tokens_per_image if self.model.vision is not None else 0
        fitting = (self.max_tokens - DEFAULT_NEW_TOKENS) // an_image if an_image else self._media.max_images
        return ModelInfo(
            name=self.model.spec.name,
            architecture=self.model.spec.architecture,
            images=sees,
            videos=bool(frames),
            diffusion=not self.model.spec.causal,
            recompute_policies=policies,
            commit_policies=self._commit_policies,
            pruners=self._pruners,
            max_tokens=self.max_tokens,
            max_images=min(self._media.max_images, fitting) if sees else 0,
            visual_tokens_per_image=an_image,
            max_image_bytes=self._media.max_item_bytes,
            max_videos=self._media.max_videos if frames else 0,
            frames_per_video=frames,
            max_video_seconds=self._media.max_video_seconds if frames else 0.0,
            max_video_bytes=self._media.max_item_bytes if frames else 0,
            max_new_tokens=self.model.spec.block_length() if self.model.spec.renoising else DEFAULT_NEW_TOKENS,
            block_length=self.model.spec.block_length(),
            recompute_policy=policies[0],
            commit_policy=self._commit_policies[0],
            parameters=self.model.parameters,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self.model.device),
            kernels={} if isinstance(self.model, CanvasModel) else self.store.kernels,
            kv_reductions=tuple(REDUCTIONS) if self.model.spec.causal and self._reducible else (),
            image_reuses=tuple(REUSES) if self.model.spec.causal and sees and self._reducible else (),
        )

    def check(self, request: Request) -> None:
        """Refuse at once what no stage could do.

        ``InvalidArgument`` for unknown policies, for blocks other than those of the model's attention, and for endless
        text: it is only tokenized in a stage, where megabytes of it would keep others waiting for seconds.
        ``Unimplemented`` for a policy that the model's kind of attention makes wrong, and for a pruner that its tower
        cannot serve.
        """
        self._require("commit", request.diffusion.commit.name, self._commit_policies)
        commit = commit_policy(request, self._offered)
        self._require("recompute", request.diffusion.recompute.name, self._recompute_policies)
        recompute_policy(request)
        check_sampling(request, self.model.spec, commit)
        pruner_of(request)
        if request.vision.pruner not in (*self._pruners, "none"):
            known = f"it has {', '.join(self._pruners)}" if self._pruners else "it takes no images"
            raise Unimplemented(f"model {self.model.spec.name!r} has no pruner {request.vision.pruner!r}; {known}")
        self._check_reduction(request)
        check_reuse(request, self.model, reads_pages=self._reducible)
        asked = request.constraint
        if self.model.spec.renoising is not None:
            if asked is not None and (asked.scaffold or isinstance(asked.kind, Template)):
                raise Unimplemented(f"model {self.model.spec.name!r} takes no templates: it has no mask token")
            check_renoising(request, self.model.spec.block_length(), commit)
        block = self.model.spec.attention_block
        if block and request.diffusion.block_length not in (0, block):
            why = "one token after another" if block == 1 else f"blocks of {block}"
            raise InvalidArgument.of("diffusion.block_length", f"must be {block}: the model decodes {why}")
        characters = sum(len(p.text) for m in request.messages for p in m.parts if isinstance(p, TextPart))
        if characters > self.max_tokens * self._longest_token:
            raise InvalidArgument.of("messages", f"{characters} characters are more than {self.max_tokens} tokens hold")

    def _check_reduction(self, request: Request) -> None:
        """Refuse a reduction of K/V that this model, or what else is asked for, leaves no room for."""
        if reduction_of(request) is None:
            return
        name = self.model.spec.name
        if not self.model.spec.causal:
            raise Unimplemented(f"model {name!r} reduces no K/V: only autoregressive models never run a position again")
        if not self._reducible:
            raise Unimplemented(f"model {name!r} reduces no K/V here: the server has [engine] sparse_* or kv_bits")
        if request.diffusion.recompute.name != "last":
            raise InvalidArgument.of("diffusion.recompute", "must be 'last' with kv_reduction")
        if request.diffusion.commit.name in DRAFTING:
            raise InvalidArgument.of("diffusion.commit", "must not be a policy that drafts with kv_reduction")

    def _require(self, kind: str, asked: str, allowed: tuple[str, ...]) -> None:
        """``Unimplemented`` for a policy that there is, but not for this model."""
        if exists(asked) and asked not in allowed:
            spec = self.model.spec
            raise Unimplemented(lacking(spec.name, kind, asked, allowed, diffusion=not spec.causal))

    def constrain(self, batch: list[Request]) -> list[BaseException | None]:
        """Make each request's constraint ready, or say why it cannot be kept."""
        return run_isolated(self._admit, batch)

    def encode(self, batch: list[Request]) -> list[EncodedPrompt | BaseException]:
        """Encode each request, once for all of its samples; what the engine must know of its prompt."""
        outcomes = run_isolated(self._encoded, batch)
        return [self._send_encoded(r, o) if isinstance(o, Encoded) else o for r, o in zip(batch, outcomes, strict=True)]

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
                self.to_decode.send(request.id, outcome)
                outcomes.append(None)
        return outcomes

    def decode(self, batch: list[Request]) -> list[Stepped | BaseException]:
        """One step of each request."""
        opened = [outcome for request in batch for outcome in run_isolated(self._states, [request])]
        proposed = iter(run_isolated(self.decoder.propose, [s for s in opened if not isinstance(s, BaseException)]))
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
        held = state.held
        if self.model.spec.causal:  # what a draft left behind the answer's end is of no use
            held = min(held, state.canvas.prompt_length + state.text.tokens - state.evicted)
        counts = (state.text.tokens, state.forwards, state.recomputed, state.edits, held)
        beside = 0 if state.companion is None else state.companion.forwards
        constrained = state.constrained
        if constrained is None:
            return Answer(state.text.text, *counts, tokens, beside)
        asked = state.request.constraint
        whole = asked is not None and isinstance(asked.kind, Template) and not state.text.stopped
        return Answer(
            state.text.text,
            *counts,
            tokens,
            beside,
            constrained.warnings,
            constrained.witness.cut,
            constrained.sampled.log_weight if constrained.sampled is not None else None,
            constrained.meter.stats(),
            constrained.holes(known_tokens(state.canvas)) if whole else (),
        )

    def release(self, request: RequestId) -> None:
        """Forget a request wherever it stands; its pages are the engine's to take back. Not while a stage runs it."""
        self._admitted.pop(request, None)
        self.to_prefill.drop(request)
        self.to_decode.drop(request)
        self._prefilling.pop(request, None)
        ended = self._decoding.pop(request, None)
        if ended is not None and ended.constrained is not None:
            took = ended.constrained.meter.stats()
            self.constraint_steps += took.steps
            self.constraint_fallbacks += took.fallbacks
            self.constraint_late += took.late

    def warm(self) -> None:
        """Make ready what the first constrained request would wait for: seconds. Blocks, for less than that."""
        self._admission.warm()

    def close(self) -> None:
        """End what runs beside the stages."""
        self._admission.close()

    @property
    def held(self) -> int:
        """Requests of which anything is kept."""
        waiting = len(self._admitted) + self.to_prefill.waiting + self.to_decode.waiting
        return waiting + len(self._prefilling) + len(self._decoding)

    @property
    def store(self) -> KVStore:
        """Where the decoder keeps K/V; a renoising model's network keeps its own, and has none."""
        store: KVStore = self.decoder.store
        return store

    @property
    def _recompute_policies(self) -> tuple[str, ...]:
        if self.model.spec.renoising:
            return RENOISING
        return {
            Attention.FULL: FULL_ATTENTION,
            Attention.PREFIX: FULL_ATTENTION,
            Attention.BLOCK_CAUSAL: BLOCK_CAUSAL_ATTENTION,
            Attention.CAUSAL: CAUSAL_ATTENTION,
        }[self.model.spec.attention]

    @property
    def _pruners(self) -> tuple[str, ...]:
        """Those whose evidence tower or decoder can show; networks with K/V of their own know no gaps in them."""
        if self.model.vision is None or isinstance(self.model, CanvasModel):
            return ()
        return pruners_for(self.model.vision.evidence | shown_by(self.model))

    @property
    def _commit_policies(self) -> tuple[str, ...]:
        model = self.model
        known: tuple[str, ...] = CAUSAL_COMMIT if model.spec.causal else DIFFUSION_COMMIT
        if model.spec.renoising is not None:
            known = RENOISING_COMMIT
        absent = ACCOMPANIED if model.companion is None else frozenset()
        absent |= FILTERED if model.commit_filter is None else frozenset()
        absent |= frozenset() if self._drafts else DRAFTING
        added = ("scheduler",) if self._offered.schedulers else ()
        return (*(name for name in known if name not in absent), *added)

    def _admit(self, batch: list[Request]) -> list[None]:
        for request in batch:
            assert request.constraint is not None
            self._admitted[request.id] = self._admission.admit(request.constraint, request.sampling.max_new_tokens)
        return [None] * len(batch)

    def _encoded(self, batch: list[Request]) -> list[Encoded]:
        return [
            replace(one, span_keys=self.decoder.blender.keys(one)) if reused(reuse_of(request), one) else one
            for request, one in zip(batch, self.encoder.encode(batch), strict=True)
        ]

    def _send_encoded(self, request: Request, encoded: Encoded) -> EncodedPrompt:
        shares = self._shares and request.diffusion.recompute.name in KEEPS_PROMPT and request.kv_reduction is None
        keys = self._keys(encoded) if shares else ()
        taken = reused(reuse_of(request), encoded)
        if taken:  # what stands behind an image that was not run is of this request alone
            keys = keys[: encoded.spans[0].start // self.store.page_size]
        admitted = self._admitted.pop(request.id, None)
        for sample in samples(request):  # they share it: whatever stands in it is read, never changed
            self.to_prefill.send(sample.id, encoded)
            if admitted is not None:
                self._admitted[sample.id] = admitted
        rows, visual = len(encoded.ids), len(encoded.image_rows)
        usage = Usage(rows, visual, 0, visual_tokens_before=visual + encoded.pruned, reused_tokens=taken)
        return EncodedPrompt(usage, keys)

    def _keys(self, encoded: Encoded) -> tuple[bytes, ...]:
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
        )

    def _begin(self, batch: list[tuple[Request, PageTable]]) -> list[tuple[Request, Any] | None]:
        """The prefill state of each request; None where something comes before its first pass, and is not yet done."""
        found: list[tuple[Request, Any] | None] = []
        for request, pages in batch:
            if request.id not in self._prefilling:
                encoded = self.to_prefill.receive(request.id)
                admitted = self._admitted.pop(request.id, None)
                self._prefilling[request.id] = self.decoder.begin(request, encoded, pages, admitted)
            state = self._prefilling[request.id]
            found.append((request, state) if self.decoder.ready(state) else None)
        return found

    def _states(self, requests: list[Request]) -> list[Any]:
        for request in requests:
            if request.id not in self._decoding:
                self._decoding[request.id] = self.decoder.open(request, self.to_decode.receive(request.id))
        return [self._decoding[request.id] for request in requests]

    def _commit(self, states: list[Any]) -> list[Stepped]:
        outcomes = [self.decoder.commit(state) for state in states]
        for state, outcome in zip(states, outcomes, strict=True):
            if outcome.reason == "end" and state.constrained is not None:
                state.constrained.check(state.text.text, known_tokens(state.canvas))
        return outcomes


def _rows_apart(engine: EngineConfig) -> bool:
    """Whether rows that a pass of decode runs beside each other have no say in what each of them looks at, or in which
    of them are kept whole: only then is a row of a draft, or of forced text, what it is by itself."""
    return not (engine.sparse_decode in ("quest", "random") or engine.kv_kept)


def _decoder(model: Model, engine: EngineConfig, offered: Offered, kv: TensorCache) -> DiffusionDecoder | CanvasDecoder:
    chosen = engine.sparse_prefill or engine.sparse_decode
    if isinstance(model, CanvasModel):
        if chosen or engine.kv_bits:
            raise ConfigError(
                f"model {model.spec.name!r} keeps its K/V to itself: [engine] takes no sparse_* or kv_bits"
            )
        return CanvasDecoder(model, offered)
    beside = model.companion
    if model.device.type == "cuda":
        _check_room([m for m in (model, beside) if m is not None], engine, kv.capacity)
    companion = Companion(beside, _store(beside, engine), model) if beside is not None else None
    store = _store(model, engine)
    sparse = Sparse(model, store, engine) if chosen else None
    return DiffusionDecoder(
        model,
        store,
        chunk=engine.prefill_tokens,
        companion=companion,
        offered=offered,
        sparse=sparse,
        graphs=graphs_for(model, store, engine.cuda_graphs, sparse),
        blender=Blender(model, store, kv),
        runs_ahead=_rows_apart(engine),
    )


def _check_room(models: list[LoadedModel], engine: EngineConfig, kv_bytes: int) -> None:
    """``ConfigError`` where a GPU has no room for the models' pages beside what is kept for ``image_reuse``."""
    first = models[0]
    whole = not (engine.sparse_prefill or engine.sparse_decode or engine.kv_bits)
    kept = kv_bytes if first.spec.causal and first.vision is not None and whole else 0
    pools = [pool_bytes(m.decoder.config, engine, m.dtype) for m in models]
    check_room(pools, kept, free_bytes(first.device), first.device)


def _store(model: LoadedModel, engine: EngineConfig) -> KVStore:
    """Room for the engine's pages: a request's page ids are good in the store of each model that it runs through."""
    config, pages, page = model.decoder.config, engine.pages, engine.page_size
    if not engine.kv_bits:
        return KVStore(config, pages=pages, page_size=page, dtype=model.dtype, device=model.device)
    return QuantizedStore(
        config,
        pages=pages,
        page_size=page,
        dtype=model.dtype,
        device=model.device,
        bits=engine.kv_bits,
        kept=engine.kv_kept,
    )
