"""Prefill of masked diffusion and next-token models: step 0, in which prompt and masked canvas run together."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mmserve.constraint.session.session import Session
from mmserve.core.encoded import Encoded
from mmserve.core.request import Request
from mmserve.decode.begin import begin
from mmserve.decode.extensions.base import watched
from mmserve.decode.forward import Pass
from mmserve.decode.parts import Parts
from mmserve.decode.state import Prefilled, Prefilling
from mmserve.kv.pool import pages_for
from mmserve.kv.table import PageTable


class Prefill:
    """Prefill with the ``parts`` that decode has too; holds no state of any request."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @torch.inference_mode()
    def begin(self, request: Request, encoded: Encoded, pages: PageTable, session: Session | None = None) -> Prefilling:
        """As of ``Decoder.begin``."""
        return begin(self._parts, request, encoded, pages, session)

    @torch.inference_mode()
    def ready(self, begun: Prefilling) -> bool:
        """As of ``Decoder.ready``."""
        most = self._parts.passes.chunk * len(self._parts.model.decoder.layers)
        return all(extension.ready(most) for extension in begun.extensions)

    @torch.inference_mode()
    def run(self, batch: list[tuple[Request, Prefilling]]) -> list[Prefilled | None]:
        """One pass over all requests: canvas with pages and candidates out, None where some of the prompt is left.

        Requests are changed only when nothing can fail any more: after a failure the call can be repeated.
        """
        parts = self._parts
        passes = [self._first(begun) for _request, begun in batch]
        guided = [
            (p, None if begun.lacks_masks else begun.guidance)
            for p, (_request, begun) in zip(passes, batch, strict=True)
        ]
        logits, seconds = parts.runner.run("prefill", guided, self._written(batch, passes))
        proposed = [
            parts.proposer.propose(request, begun.commit, begun.extensions, p, rows) if len(p.targets) else None
            for (request, begun), p, rows in zip(batch, passes, logits, strict=True)
        ]
        for extension in parts.extensions:
            extension.after_prefill(
                [(begun, p.rows) for (_request, begun), p in zip(batch, passes, strict=True) if not begun.lacks_masks]
            )
        results: list[Prefilled | None] = []
        for (_request, begun), p, found in zip(batch, passes, proposed, strict=True):
            lacked, begun.masks_run = begun.lacks_masks, p.visible
            if lacked:
                results.append(None)
                continue
            begun.run = p.visible
            for each in begun.extensions:
                each.after_forward(p, seconds)
            if found is None:
                self._final(begun, p)
                results.append(None)
                continue
            p.canvas.count_forward()
            reused = begun.reused + sum(each.reused for each in begun.extensions)
            run = begun.run - reused + (p.visible if begun.guidance is not None else 0)
            rest = begun.extensions, begun.deep, begun.guidance, begun.adapter
            results.append(Prefilled(p.canvas, p.pages, p.embeddings, found, run, p.visible, *rest))
        for (_request, begun), result in zip(batch, results, strict=True):
            if result is not None and begun.outgoing is not None:
                result.ahead = begun.outgoing.finish(result.held)
        return results

    def _written(self, batch: list[tuple[Request, Prefilling]], passes: list[Pass]) -> Callable[[int], None] | None:
        """What reports the layers of a pass to those requests whose K/V go ahead of them; None where none do."""
        going = [(begun, p) for (_request, begun), p in zip(batch, passes, strict=True) if begun.outgoing is not None]
        if not going:
            return None

        def written(layers: int) -> None:
            for begun, p in going:
                self._final(begun, p, layers)

        return written

    def _final(self, begun: Prefilling, p: Pass, layers: int | None = None) -> None:
        """The first ``layers`` (None = all) have the K/V of a pass: of a prompt of which some is left, whole pages."""
        if begun.outgoing is not None:
            store = self._parts.store
            pages = p.visible // store.page_size if not len(p.targets) else pages_for(p.visible, store.page_size)
            begun.outgoing.final(store.num_layers if layers is None else layers, pages)

    def _first(self, begun: Prefilling) -> Pass:
        """What is run next; what extensions watch is the request's own sequence."""
        p = self._parts.passes.first(begun)
        return p if begun.lacks_masks else watched(p, begun.extensions, first=True)
