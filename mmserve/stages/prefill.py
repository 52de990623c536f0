"""The prefill stage: prompts into K/V pages, and the first candidates of their answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mmserve.constraint.restored import Restorer
from mmserve.core.encoded import Encoded
from mmserve.core.events import PromptToken
from mmserve.core.isolation import run_isolated
from mmserve.core.payloads import EncodedPayload
from mmserve.core.request import Request, RequestId
from mmserve.core.samples import samples
from mmserve.decode.decoder_pruning import DecoderPruning
from mmserve.decode.extensions.base import extension_of
from mmserve.decode.extensions.image_reuse.checks import reused
from mmserve.decode.extensions.image_reuse.reuse import ImageKVReuse
from mmserve.decode.state import Prefilled, Prefilling
from mmserve.encode.arriving import Arriving
from mmserve.encode.embedding import place_features
from mmserve.kv.ahead import Outgoing, Send
from mmserve.kv.prefix_tier import Fetched, PrefixTier
from mmserve.kv.reuse import reuse_of
from mmserve.kv.table import PageTable
from mmserve.models.attended import shown_by
from mmserve.models.base import LoadedModel, Model
from mmserve.observe.traces import observed, stage_pass
from mmserve.stages.prompt import EncodedPrompt, Prompt, Summaries
from mmserve.transfer.base import Transport

#: The result of ``PrefillStage.prefill`` for a request.
Outcome = int | EncodedPrompt | BaseException | None


class PrefillStage:
    """Prefill of one model: prompts arrive by ``to_prefill``, and results are sent to decode by ``to_decode``.

    Used by a single worker.
    """

    def __init__(
        self,
        model: Model,
        decoder: Any,
        summaries: Summaries,
        to_prefill: Transport,
        to_decode: Transport,
        tier: PrefixTier | None = None,
        *,
        max_tokens: int,
    ) -> None:
        self.model, self._decoder, self._summaries, self._max_tokens = model, decoder, summaries, max_tokens
        self._to_prefill, self._to_decode = observed(to_prefill, "prefill"), observed(to_decode, "decode")
        self._decoder_pruning = DecoderPruning(model) if isinstance(model, LoadedModel) and shown_by(model) else None
        self._restorer = Restorer(model)
        self._prompts: dict[RequestId, Prompt] = {}  # of samples whose prompt was pruned by the decoder
        self.begun: dict[RequestId, Any] = {}  # states of the decoder
        self._arriving: dict[RequestId, Arriving] = {}  # of requests with visual tokens still to come
        self._tier = tier
        self.fetched: dict[RequestId, Fetched] = {}  # pages from host memory or disk, of requests that have not begun
        self.restored: dict[RequestId, int] = {}  # number of them that were used, until read by the engine
        #: Tokens of prompts with log-probabilities, if requested, until read by the engine.
        self.prompt_tokens: dict[RequestId, tuple[PromptToken, ...]] = {}
        #: K/V sent ahead of requests that are decoded elsewhere, in chunks of bounded size.
        self.ahead_senders: dict[RequestId, tuple[Send, int]] = {}
        self._ahead_thread = ThreadPoolExecutor(1, "mmserve-ahead")

    def prefill(self, batch: list[tuple[Request, PageTable]]) -> list[Outcome]:
        """Prefill each request into its pages, a long prompt by one chunk.

        Results: None = done; a number = positions run so far of an unfinished prompt; an ``EncodedPrompt`` = the
        prompt, which was ``unpruned``, after pruning by the decoder, with no page used yet.
        """
        with stage_pass("prefill", [request for request, _pages in batch]):
            return self._prefilled(batch)

    def _prefilled(self, batch: list[tuple[Request, PageTable]]) -> list[Outcome]:
        opened = [outcome for item in batch for outcome in run_isolated(self._begin, [item])]
        ready = [o for o in opened if isinstance(o, tuple)]
        ran = iter(run_isolated(self._decoder.prefill, ready))
        outcomes: list[Outcome] = []
        for (request, _pages), state in zip(batch, opened, strict=True):
            if not isinstance(state, tuple):
                outcomes.append(self.begun[request.id].run if state is None else state)
                continue
            outcome = next(ran)
            if outcome is None:
                outcomes.append(self.begun[request.id].run)
            elif isinstance(outcome, BaseException):
                outcomes.append(outcome)
            else:
                del self.begun[request.id]
                self.ahead_senders.pop(request.id, None)
                self._arriving.pop(request.id, None)
                if isinstance(outcome, Prefilled) and outcome.prompt_tokens:
                    self.prompt_tokens[request.id] = outcome.prompt_tokens
                outcomes += run_isolated(self._handed_over, [(request, outcome)])
        return outcomes

    def discard(self, request: RequestId) -> None:
        """Drop all state of a request, and its prompt if it waits; not while the worker runs it."""
        self._to_prefill.drop(request)
        self._prompts.pop(request, None)
        self.ahead_senders.pop(request, None)
        begun = self.begun.pop(request, None)
        if isinstance(begun, Prefilling) and begun.outgoing is not None:
            begun.outgoing.close()
        self._arriving.pop(request, None)
        self.restored.pop(request, None)
        self.prompt_tokens.pop(request, None)
        fetched = self.fetched.pop(request, None)
        if fetched is not None:
            fetched.close()

    def waiting(self, request: RequestId) -> Prompt | EncodedPayload:
        """The prompt of a request whose prefill has not begun; it stays here until ``discard``."""
        if request in self._prompts:
            return self._prompts[request]
        prompt: Prompt | EncodedPayload = self._to_prefill.receive(request)
        self._to_prefill.send(request, prompt)
        return prompt

    @property
    def held(self) -> int:
        """Number of requests with state in this stage."""
        return len(self._prompts) + len(self.begun) + len(self._arriving) + len(self.fetched)

    def _handed_over(self, batch: list[tuple[Request, Any]]) -> list[None]:
        for request, prefilled in batch:
            live = self._to_decode.in_process
            self._to_decode.send(request.id, prefilled if live else self._decoder.payload(prefilled))
        return [None] * len(batch)

    def _begin(self, batch: list[tuple[Request, PageTable]]) -> list[tuple[Request, Any] | EncodedPrompt | None]:
        """The prefill state of each request; None if a step before its first pass is not finished."""
        return [self._begun(request, pages) for request, pages in batch]

    def _begun(self, request: Request, pages: PageTable) -> tuple[Request, Any] | EncodedPrompt | None:
        if request.id not in self.begun:
            prompt = self._prompts.pop(request.id, None) or self._received(request)
            if prompt.encoded.grids:
                return self._prune_by_decoder(request, prompt)
            if prompt.arriving is not None:
                self._arriving[request.id] = prompt.arriving
            session = next(iter(prompt.constraints), None)
            pages = self._restored(request.id, pages)
            begun = self._decoder.begin(request, self._keyed(request, prompt.encoded), pages, session)
            self._send_ahead(request.id, begun, arriving=prompt.arriving is not None)
            self.begun[request.id] = begun
        state = self.begun[request.id]
        self._place_new(request.id, state)
        return (request, state) if self._decoder.ready(state) else None

    def _send_ahead(self, request: RequestId, begun: Any, *, arriving: bool) -> None:
        """Send the K/V of a request that is decoded elsewhere ahead of it, if they are final once written."""
        sender = self.ahead_senders.get(request)
        if sender is None or arriving or not isinstance(begun, Prefilling) or begun.rewrites_prompt:
            return
        send, least = sender
        store = self._decoder.parts.store
        outgoing = Outgoing(store, begun.pages, least, send, self._ahead_thread)
        if outgoing.worthwhile:
            begun.outgoing = outgoing
            outgoing.final(store.num_layers, begun.run)  # the pages shared with other requests

    def _restored(self, request: RequestId, pages: PageTable) -> PageTable:
        """``pages``, after filling them with K/V found in host memory or on disk."""
        fetched = self.fetched.pop(request, None)
        if fetched is None or self._tier is None:
            return pages
        begin, ids = pages.shared, np.asarray(pages.ids, np.int64)
        count = self._tier.restore(fetched, ids[begin:], pages.keys[begin:], self._summaries.shared_pages)
        fetched.close()
        if not count:
            return pages
        size = self._tier.page_size
        self._decoder.parts.runner.record_loaded(ids[begin : begin + count], count * size)
        self.restored[request] = count
        return replace(pages, shared=begin + count)

    def _received(self, request: Request) -> Prompt:
        payload = self._to_prefill.receive(request.id)
        if not isinstance(payload, EncodedPayload):
            prompt: Prompt = payload
            return prompt
        restored = [self._restorer.restored(request, state) for state in payload.constraints]
        return Prompt(payload.encoded, restored)

    @torch.inference_mode()
    def _prune_by_decoder(self, request: Request, prompt: Prompt) -> EncodedPrompt:
        """Prune a prompt by the decoder's evidence, once for all samples of its request."""
        assert self._decoder_pruning is not None, "only models that give the decoder's evidence offer such pruners"
        encoded = self._decoder_pruning.pruned(request, prompt.encoded, self._max_tokens)
        for i, sample in enumerate(samples(request)):
            self._prompts[sample.id] = Prompt(encoded, prompt.constraints[i : i + 1])
        return self._summaries.of(request, encoded)

    def _keyed(self, request: Request, encoded: Encoded) -> Encoded:
        """``encoded`` with the keys of images whose K/V are reused."""
        if not reused(reuse_of(request), encoded):
            return encoded
        reuse = extension_of(self._decoder.parts.extensions, ImageKVReuse)
        return encoded if reuse is None else replace(encoded, span_keys=reuse.keys(encoded, request.tenant.cache))

    @torch.inference_mode()
    def _place_new(self, request: RequestId, state: Any) -> None:
        """Add the visual tokens that arrived since the last chunk."""
        arriving = self._arriving.get(request)
        new = None if arriving is None else arriving.fetch()
        if new is not None and isinstance(self.model, LoadedModel):
            place_features(self.model, state.embeddings, *new)
