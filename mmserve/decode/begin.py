"""How a request begins: its canvas, its embeddings, and what of its extensions attaches to it."""

from __future__ import annotations

import numpy as np

from mmserve.constraint.session.session import Session
from mmserve.core.canvas import Canvas
from mmserve.core.encoded import Encoded
from mmserve.core.request import Request
from mmserve.decode.extensions.base import Opening, RequestExtension
from mmserve.decode.extensions.constraint import Constraint
from mmserve.decode.guidance import guidance_of
from mmserve.decode.parts import Parts
from mmserve.decode.policies import commit_policy
from mmserve.decode.seeded import lay_out
from mmserve.decode.state import Prefilling
from mmserve.encode.embedding import embedded
from mmserve.errors import Unimplemented
from mmserve.kv.table import PageTable
from mmserve.models.base import Attention
from mmserve.models.decisions import slots


def begin(
    parts: Parts, request: Request, encoded: Encoded, pages: PageTable, session: Session | None = None
) -> Prefilling:
    """The prefill state of a request: ``encoded`` its prompt, ``pages`` its pages, of which the first may be filled
    already: it begins after those. ``session``: its constraint, if it has one.

    A constraint comes last of the request's extensions: it chooses among what the others leave.
    """
    model, spec = parts.model, parts.model.spec
    asked = None
    if request.decisions:
        asked = slots(model.tokenizer, request.decisions, spec.mask_id, together=spec.decides_together)
    new_tokens = request.sampling.max_new_tokens if asked is None else len(asked.ids)
    canvas = Canvas.create(
        encoded.ids,
        new_tokens=new_tokens,
        block_length=spec.block_length(request.diffusion.block_length if asked is None else new_tokens),
        mask_id=spec.mask_id,
        aligned=spec.attention is Attention.BLOCK_CAUSAL,
        places=encoded.places,
        logit_shift=spec.logit_shift,
    )
    if asked is not None:
        given = np.setdiff1d(np.arange(new_tokens), asked.places)
        canvas.commit(canvas.prompt_length + given, np.array(asked.ids, np.int64)[given])
    lay_out(canvas, request.diffusion.seed_canvas)
    constraint = None if session is None else Constraint(session)
    read = canvas.tokens if constraint is None else constraint.session.prepare(canvas, spec.mask_id)
    embeddings, deep = embedded(model, read, encoded)
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
    )
