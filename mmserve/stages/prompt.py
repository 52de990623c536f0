"""A prompt between encode and prefill: what travels, and what the engine learns of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mmserve.config import EngineConfig
from mmserve.constraint.restored import session_state
from mmserve.constraint.session.session import Session
from mmserve.core.encoded import Encoded
from mmserve.core.events import Usage
from mmserve.core.payloads import EncodedPayload
from mmserve.core.request import Request
from mmserve.decode.extensions.image_reuse.checks import reused
from mmserve.decode.recompute import KEEPS_PROMPT
from mmserve.encode.arriving import Arriving
from mmserve.kv.prefix import page_keys, pages_a_unit
from mmserve.kv.reuse import reuse_of
from mmserve.models.base import EncoderModel


@dataclass(frozen=True)
class EncodedPrompt:
    """What the engine learns of a prompt: its token counts, and the keys of its pages that may be shared.

    ``unpruned``: the decoder has to prune it before any page is taken; what is left of it is known only then.
    """

    usage: Usage
    keys: tuple[bytes, ...]
    unpruned: bool = False


@dataclass(frozen=True)
class Prompt:
    """Encode → prefill within one process: as ``EncodedPayload``, with the live objects in place of their states.

    ``constraints``: of the request, or of each sample of one that is not split yet; empty where it has none.
    ``arriving``: where visual tokens are still on their way.
    """

    encoded: Encoded
    constraints: Sequence[Session] = ()
    arriving: Arriving | None = None


def plain_prompt(prompt: Prompt) -> EncodedPayload:
    """``prompt`` for another process. Raises ``Unimplemented`` where a constraint's state cannot travel."""
    return EncodedPayload(prompt.encoded, tuple(session_state(session) for session in prompt.constraints))


def _cache_of(request: Request) -> str:
    """Only requests of the same shared pages: their tenants', and with the same adapter."""
    return f"{request.tenant.cache}\0{request.adapter}" if request.adapter else request.tenant.cache


class Summaries:
    """Makes an ``EncodedPrompt`` of each prompt of one model."""

    def __init__(self, model: EncoderModel, engine: EngineConfig) -> None:
        spec = model.spec
        self._spec, self._page_size = spec, engine.page_size
        self.shared_pages = pages_a_unit(engine.page_size, spec.attention_block or 1)  # at once
        # Chunks that begin within a page would make its last bits depend on where a request began to run.
        whole_pages = not spec.causal or not 0 < engine.prefill_tokens < engine.page_size
        # A renoising model's network keeps its K/V to itself: nothing is ever written to the pages of its requests.
        paged = spec.renoising is None and spec.attention_block is not None
        self.shares = engine.prefix_cache and paged and whole_pages

    def of(self, request: Request, encoded: Encoded) -> EncodedPrompt:
        """What the engine learns of the prompt of ``request``."""
        shares = self._may_share(request) and encoded.past is None  # such K/V come from another prompt
        keys = self._keys(encoded, _cache_of(request)) if shares and not encoded.grids else ()
        taken = reused(reuse_of(request), encoded) if encoded.past is None else len(encoded.past.rows)
        if encoded.past is None and taken:  # what follows an image that was not run is of this request alone
            keys = keys[: encoded.spans[0].start // self._page_size]
        rows, visual = len(encoded.ids), len(encoded.image_rows)
        usage = Usage(rows, visual, 0, visual_tokens_before=visual + encoded.pruned, reused_tokens=taken)
        return EncodedPrompt(usage, keys, unpruned=bool(encoded.grids))

    def begun(self, request: Request, encoded: Encoded) -> EncodedPrompt:
        """The same of a prompt whose visual tokens are still on their way: only the text before them has keys."""
        prompt = self.of(request, encoded)
        return replace(prompt, keys=prompt.keys[: int(encoded.image_rows[0]) // self._page_size])

    def _may_share(self, request: Request) -> bool:
        keeps = request.diffusion.recompute.name in KEEPS_PROMPT and request.kv_reduction is None
        return self.shares and keeps

    def _keys(self, encoded: Encoded, cache: str) -> tuple[bytes, ...]:
        """Hashed here and not where pages are taken: the engine's thread has no time for megabytes of features."""
        features = encoded.features
        return page_keys(
            encoded.ids,
            encoded.image_rows,
            None if features is None else features.contiguous().view(torch.uint8).cpu().numpy(),
            encoded.places,
            page_size=self._page_size,
            block=self._spec.attention_block or 1,
            logit_shift=self._spec.logit_shift,
            sight=self._spec.sight(encoded.ids),
            cache=cache,
        )
