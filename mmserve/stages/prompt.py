"""A prompt between encode and prefill: its payload, and its summary for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mmserve.config import EngineConfig
from mmserve.constraint.restored import session_state
from mmserve.constraint.session.session import Session
from mmserve.core.encoded import Encoded
from mmserve.core.events import PromptText, Usage
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
    """Summary of a prompt for the engine: its token counts, and the keys of its shareable pages.

    ``unpruned``: the decoder must prune it before pages are allocated; its final length is known only then.
    ``text``: only if requested.
    """

    usage: Usage
    keys: tuple[bytes, ...]
    unpruned: bool = False
    text: PromptText | None = None


@dataclass(frozen=True)
class Prompt:
    """Payload from encode to prefill within one process: as ``EncodedPayload``, with live objects instead of their
    states.

    ``constraints``: one for the request, or one for each sample if it is not split yet; empty if there are none.
    ``arriving``: set while visual tokens are still to come.
    """

    encoded: Encoded
    constraints: Sequence[Session] = ()
    arriving: Arriving | None = None


def plain_prompt(prompt: Prompt) -> EncodedPayload:
    """``prompt`` as plain data for another process. Raises ``Unimplemented`` if a constraint's state cannot be
    serialized."""
    return EncodedPayload(prompt.encoded, tuple(session_state(session) for session in prompt.constraints))


def _cache_of(request: Request) -> str:
    """The cache namespace of a request: only requests of the same tenant and adapter share pages."""
    return f"{request.tenant.cache}\0{request.adapter}" if request.adapter else request.tenant.cache


class Summaries:
    """Creates the ``EncodedPrompt`` of each prompt of one model."""

    def __init__(self, model: EncoderModel, engine: EngineConfig) -> None:
        spec = model.spec
        self._spec, self._page_size, self._tokenizer = spec, engine.page_size, model.tokenizer
        self.shared_pages = pages_a_unit(engine.page_size, spec.attention_block or 1)  # pages that are shared together
        # Chunks that begin within a page would make its last bits depend on the first position that a request runs.
        whole_pages = not spec.causal or not 0 < engine.prefill_tokens < engine.page_size
        # The network of a renoising model has its own K/V: the pages of its requests are never written.
        paged = spec.renoising is None and spec.attention_block is not None
        self.shares = engine.prefix_cache and paged and whole_pages

    def of(self, request: Request, encoded: Encoded) -> EncodedPrompt:
        """The summary of the prompt of ``request``."""
        shares = self._may_share(request) and encoded.past is None  # these K/V come from another prompt
        keys = self._keys(encoded, _cache_of(request)) if shares and not encoded.grids else ()
        taken = reused(reuse_of(request), encoded) if encoded.past is None else len(encoded.past.rows)
        if encoded.past is None and taken:  # K/V after an image with reused K/V are not shareable
            keys = keys[: encoded.spans[0].start // self._page_size]
        rows, visual = len(encoded.ids), len(encoded.image_rows)
        usage = Usage(rows, visual, 0, visual_tokens_before=visual + encoded.pruned, reused_tokens=taken)
        text = self._text(encoded.ids.tolist()) if request.streaming.prompt else None
        return EncodedPrompt(usage, keys, unpruned=bool(encoded.grids), text=text)

    def begun(self, request: Request, encoded: Encoded) -> EncodedPrompt:
        """The summary of a prompt whose visual tokens are still to come: only the text before them has keys."""
        prompt = self.of(request, encoded)
        return replace(prompt, keys=prompt.keys[: int(encoded.image_rows[0]) // self._page_size])

    def _text(self, ids: list[int]) -> PromptText:
        return PromptText(tuple(ids), str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)))

    def _may_share(self, request: Request) -> bool:
        keeps = request.diffusion.recompute.name in KEEPS_PROMPT and request.kv_reduction is None
        return self.shares and keeps and not request.streaming.prompt_tokens  # rows of shared pages are not run

    def _keys(self, encoded: Encoded, cache: str) -> tuple[bytes, ...]:
        """Hashed here and not where pages are allocated: hashing megabytes of features would block the engine's
        thread."""
        features = encoded.features
        return page_keys(
            encoded.ids,
            encoded.image_rows,
            None if features is None else features.contiguous().view(torch.uint8).cpu().numpy(),
            encoded.places,
            page_size=self._page_size,
            block=self._spec.attention_block or 1,
            logit_shift=self._spec.logit_shift,
            span=self._spec.attention_spans(encoded.ids),
            cache=cache,
        )
