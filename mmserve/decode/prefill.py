"""Prefill of masked diffusion and next-token models: step 0, in which prompt and masked canvas run together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from mmserve.constraint.session.session import Session
from mmserve.core.canvas import Canvas
from mmserve.core.encoded import Encoded
from mmserve.core.request import Request
from mmserve.decode.branched import not_run, question_canvas, repeat_embeddings, with_repeated_past
from mmserve.decode.commit import Candidates
from mmserve.decode.extensions.base import Opening, RequestExtension, watched
from mmserve.decode.extensions.constraint import Constraint
from mmserve.decode.forward import Pass
from mmserve.decode.guidance import guidance_of
from mmserve.decode.parts import Parts
from mmserve.decode.policies import commit_policy
from mmserve.decode.prompt_scores import PromptScores
from mmserve.decode.seeded import write_pinned
from mmserve.decode.state import Prefilled, Prefilling
from mmserve.encode.embedding import embedded
from mmserve.errors import Unimplemented
from mmserve.kv.table import PageTable
from mmserve.models.base import Attention
from mmserve.models.decisions import questions_ids


class Prefill:
    """Prefill with the ``parts`` shared with decode; holds no state of any request."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @torch.inference_mode()
    def begin(self, request: Request, encoded: Encoded, pages: PageTable, session: Session | None = None) -> Prefilling:
        """The prefill state of a request.

        ``encoded``: its prompt; ``pages``: its pages, the first of which may be filled already (prefix cache): prefill
        begins after those; ``session``: its constraint. The constraint is the request's last extension: it chooses
        among what the others leave.
        """
        parts, model, spec = self._parts, self._parts.model, self._parts.model.spec
        if request.decisions:
            asked = questions_ids(model.tokenizer, request.decisions, special_tokens=spec.special_tokens)
            canvas = question_canvas(spec, encoded, asked, parts.store.page_size)
        else:
            aligned = spec.attention is Attention.BLOCK_CAUSAL
            canvas = Canvas.create(
                encoded.ids,
                new_tokens=request.sampling.max_new_tokens,
                block_length=spec.block_length(request.diffusion.block_length),
                mask_id=spec.mask_id,
                aligned=aligned,
                places=encoded.places,
                logit_shift=spec.logit_shift,
                attention_block=spec.default_block_length if aligned else 0,
            )
        write_pinned(canvas, request.diffusion.seed_canvas)
        constraint = None if session is None else Constraint(session)
        read = canvas.tokens if constraint is None else constraint.session.prepare(canvas, spec.mask_id)
        embeddings, deep = embedded(model, read, encoded)
        if canvas.branches is not None:
            encoded = with_repeated_past(encoded, canvas.branches)
            deep = repeat_embeddings(embeddings, deep, canvas.branches)
        own_pages, guidance = guidance_of(request, model, canvas, embeddings, np.asarray(pages.ids, dtype=np.int64))
        if guidance is not None and encoded.past is not None:
            raise Unimplemented("diffusion.cfg_scale is not available in video sessions: leave it out")
        opening = Opening(request, encoded, canvas, own_pages, embeddings, deep)
        attached: list[RequestExtension | None] = [each.attach(opening) for each in parts.extensions]
        shared = pages.shared * parts.store.page_size
        return Prefilling(
            canvas,
            own_pages,
            embeddings,
            commit_policy(request, parts.offered),
            tuple(each for each in (*attached, constraint) if each is not None),
            run=shared,
            reused=shared,
            deep=deep,
            guidance=guidance,
            adapter=parts.adapters.of(request),
            prompt_scores=self._prompt_scores(request, encoded),
        )

    @torch.inference_mode()
    def ready(self, begun: Prefilling) -> bool:
        most = self._parts.passes.chunk * len(self._parts.model.decoder.layers)
        return all(extension.ready(most) for extension in begun.extensions)

    @torch.inference_mode()
    def run(self, batch: list[tuple[Request, Prefilling]]) -> list[Prefilled | None]:
        """One pass over all requests. Returns each request's canvas with pages and candidates; None if part of its
        prompt is left.

        State is changed only after everything that can fail: after a failure the call can be repeated.
        """
        parts = self._parts
        passes = [self._first(begun) for _request, begun in batch]
        guided = [
            (_scored(p, begun), None if begun.lacks_masks else begun.guidance)
            for p, (_request, begun) in zip(passes, batch, strict=True)
        ]
        computed, seconds = parts.runner.run("prefill", guided, self._written(batch, passes))
        logits = [
            rows if begun.prompt_scores is None else begun.prompt_scores.add(p, rows)
            for (_request, begun), p, rows in zip(batch, passes, computed, strict=True)
        ]
        proposed = [
            parts.proposer.propose(request, begun.commit, begun.extensions, p, rows) if len(p.targets) else None
            for (request, begun), p, rows in zip(batch, passes, logits, strict=True)
        ]
        for extension in parts.extensions:
            extension.after_prefill(
                [(begun, p.rows) for (_request, begun), p in zip(batch, passes, strict=True) if not begun.lacks_masks]
            )
        results = [
            self._after_pass(begun, p, found, seconds)
            for (_request, begun), p, found in zip(batch, passes, proposed, strict=True)
        ]
        for (_request, begun), result in zip(batch, results, strict=True):
            if result is not None and begun.outgoing is not None:
                result.ahead = begun.outgoing.finish(result.held)
        return results

    def _after_pass(
        self, begun: Prefilling, p: Pass, candidates: Candidates | None, seconds: float
    ) -> Prefilled | None:
        """Record a pass, which took ``seconds``. Returns the request after prefill; None if part of it is left."""
        lacked, begun.masks_run = begun.lacks_masks, p.visible
        if lacked:
            return None
        begun.run = p.visible
        for each in begun.extensions:
            each.after_forward(p, seconds)
        if candidates is None:
            self._final(begun, p)
            return None
        p.canvas.count_forward()
        reused = begun.reused + sum(each.reused for each in begun.extensions)
        run = begun.run - reused + (p.visible if begun.guidance is not None else 0)
        if p.canvas.branches is not None:
            run -= not_run(p.canvas.branches, self._parts.model.spec)
        scores = begun.prompt_scores
        return Prefilled(
            p.canvas,
            p.pages,
            p.embeddings,
            candidates,
            run,
            p.visible,
            begun.extensions,
            begun.deep,
            begun.guidance,
            begun.adapter,
            prompt_tokens=() if scores is None else scores.tokens(self._parts.model.tokenizer),
        )

    def _prompt_scores(self, request: Request, encoded: Encoded) -> PromptScores | None:
        model = self._parts.model
        if not request.streaming.prompt_tokens:
            return None
        if not model.spec.causal:
            raise Unimplemented("stream.prompt_tokens is only for autoregressive models: leave it out")
        vocabulary = model.decoder.config.vocab_size
        return PromptScores(encoded, model.spec, vocabulary, request.streaming.prompt_alternatives)

    def _written(self, batch: list[tuple[Request, Prefilling]], passes: list[Pass]) -> Callable[[int], None] | None:
        """A callback that reports the layers of a pass to requests whose K/V are sent ahead; None if there are none."""
        sending = [(begun, p) for (_request, begun), p in zip(batch, passes, strict=True) if begun.outgoing is not None]
        if not sending:
            return None

        def written(layers: int) -> None:
            for begun, p in sending:
                self._final(begun, p, layers)

        return written

    def _final(self, begun: Prefilling, p: Pass, layers: int | None = None) -> None:
        """Report that the first ``layers`` (None = all) have the K/V of a pass; of an incomplete prompt, full pages
        only."""
        if begun.outgoing is not None:
            store = self._parts.store
            whole = p.visible if len(p.targets) else p.visible // store.page_size * store.page_size
            begun.outgoing.final(store.num_layers if layers is None else layers, whole)

    def _first(self, begun: Prefilling) -> Pass:
        """The next pass of a request; extensions observe only its own sequence."""
        p = self._parts.passes.first(begun)
        return p if begun.lacks_masks else watched(p, begun.extensions, first=True)


def _scored(p: Pass, begun: Prefilling) -> Pass:
    """``p``, with the logits that the scores of the prompt need."""
    return p if begun.prompt_scores is None else replace(p, wanted=begun.prompt_scores.wanted(p))
