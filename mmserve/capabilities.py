"""The capabilities of one model with the settings of this server: reported to clients, and checked for each request."""

from __future__ import annotations

import json
from functools import cached_property

from mmserve.config import EngineConfig, MediaConfig
from mmserve.core.info import ModelInfo, decisions_unsupported, policy_unsupported
from mmserve.core.request import Request, TextPart, TokensPart
from mmserve.decode.checks import check_sampling, check_uniform_state
from mmserve.decode.commit import (
    ACCOMPANIED,
    CAUSAL_COMMIT,
    DIFFUSION_COMMIT,
    DRAFTING,
    FILTERED,
    RENOISING_COMMIT,
)
from mmserve.decode.extensions.image_reuse.checks import check_reuse, no_reuse
from mmserve.decode.guidance import check_guidance
from mmserve.decode.policies import Offered, commit_policy, exists, recompute_policy
from mmserve.decode.recompute import BLOCK_CAUSAL_ATTENTION, CAUSAL_ATTENTION, FULL_ATTENTION, RENOISING
from mmserve.decode.seeded import check_seed
from mmserve.defaults import tuning_of
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.kv.reduction import REDUCTIONS, reduction_of
from mmserve.kv.reuse import REUSES
from mmserve.models.attended import shown_by
from mmserve.models.base import Attention, CanvasModel, LoadedModel, Model
from mmserve.models.chat import template_for
from mmserve.models.decoder_config import UNEVEN
from mmserve.models.quantized import kind_of
from mmserve.models.template_options import template_options
from mmserve.prune import pruner_of, pruners_for
from mmserve.tools.formats import format_in

#: Token limit of an answer whose request sets none.
DEFAULT_NEW_TOKENS = 64


class Capabilities:
    """The capabilities of ``model``, from its kind, its optional parts (``offered``) and the settings of the engine."""

    def __init__(self, model: Model, engine: EngineConfig, media: MediaConfig, offered: Offered) -> None:
        self.model, self._media, self._offered = model, media, offered
        models = [model, *([model.companion] if model.companion is not None else [])]
        self.max_tokens = min([engine.max_tokens, *(m.spec.max_tokens for m in models)])
        # Whether passes read all pages in place: a reduction moves K/V unchanged, and all that remain are read.
        self.reads_pages = not (engine.sparse_prefill or engine.sparse_decode or engine.kv_bits)
        self._even = isinstance(model, CanvasModel) or model.decoder.config.plain_attention
        self._drafts = not engine.sparse_prefill and rows_apart(engine)
        self._longest_token = max(map(len, model.tokenizer.get_vocab()))
        self.tuning = tuning_of(model, self._recompute_policies, self._commit_policies, offered)

    def describe(self, kernels: dict[str, str]) -> ModelInfo:
        """The description for clients; ``kernels``: the implementation of each op."""
        sees = self.model.vision is not None
        frames = self.model.vision.frames_per_video if self.model.vision is not None else 0
        an_image = self.model.vision.tokens_per_image if self.model.vision is not None else 0
        fitting = (self.max_tokens - DEFAULT_NEW_TOKENS) // an_image if an_image else self._media.max_images
        return ModelInfo(
            name=self.model.spec.name,
            architecture=self.model.spec.architecture,
            images=sees,
            videos=bool(frames),
            diffusion=not self.model.spec.causal,
            recompute_policies=self._recompute_policies,
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
            recompute_policy=self.tuning.default.recompute.name,
            commit_policy=self.tuning.default.commit.name,
            tuning=self.tuning,
            parameters=self.model.parameters,
            dtype=kind_of(self.model),
            stored=self.model.stored,
            device=str(self.model.device),
            kernels=kernels,
            kv_reductions=tuple(REDUCTIONS) if self.model.spec.causal and self.reads_pages and self._even else (),
            tool_format=self._tool_format,
            end_ids=tuple(sorted(self.model.spec.end_ids)),
            max_canvas=self.model.spec.max_canvas,
            decisions="together" if self.model.spec.decides else "",
            image_reuses=() if no_reuse(self.model, reads_pages=self.reads_pages) else tuple(REUSES),
        )

    @property
    def _tool_format(self) -> str:
        form = format_in(template_for(self.model.tokenizer, tools=True))
        return "" if form is None else form.name

    def check(self, request: Request) -> None:
        """Reject a request that no stage could serve.

        Raises ``InvalidArgument`` for unknown policies, for blocks that do not divide those of the model's attention,
        and for overlong text: tokenizing megabytes in a stage would delay other requests by seconds. Raises
        ``Unimplemented`` for a policy that is incorrect with the model's kind of attention, and for a pruner
        unsupported by its tower.
        """
        self._require("commit", request.diffusion.commit.name, self._commit_policies)
        commit = commit_policy(request, self._offered)
        self._require("recompute", request.diffusion.recompute.name, self._recompute_policies)
        recompute_policy(request)
        check_sampling(request, self.model.spec, commit)
        if (highest := max(request.sampling.logit_bias, default=0)) >= self.model.vocab_size:
            why = f"must name tokens below {self.model.vocab_size}, not {highest}"
            raise InvalidArgument.of("sampling.logit_bias", why)
        check_guidance(request, self.model.spec)
        check_seed(request, self.model.spec, self.model.vocab_size)
        self._check_template_options(request)
        self._check_decisions(request)
        pruner_of(request)
        if request.vision.pruner not in (*self._pruners, "none"):
            known = f"it has {', '.join(self._pruners)}" if self._pruners else "it takes no images"
            raise Unimplemented(f"model {self.model.spec.name!r} has no pruner {request.vision.pruner!r}; {known}")
        self._check_reduction(request)
        self._check_adapter(request)
        check_reuse(request, self.model, reads_pages=self.reads_pages)
        if self.model.spec.renoising is not None:
            check_uniform_state(request, self.model.spec.block_length(), commit)
        block = self.model.spec.attention_block
        if block and request.diffusion.block_length and block % request.diffusion.block_length:
            how = f"divide {block}: the model decodes blocks of {block}, or parts of them one after another"
            why = "be 1: the model decodes one token after another" if block == 1 else how
            raise InvalidArgument.of("diffusion.block_length", f"must {why}")
        self._check_tokens(request)
        characters = sum(len(p.text) for m in request.messages for p in m.parts if isinstance(p, TextPart))
        characters += sum(len(call.arguments) for m in request.messages for call in m.tool_calls)
        characters += (
            0 if request.tools is None else sum(len(t.parameters) + len(t.description) for t in request.tools.tools)
        )
        if characters > self.max_tokens * self._longest_token:
            raise InvalidArgument.of("messages", f"{characters} characters are more than {self.max_tokens} tokens hold")

    def _check_tokens(self, request: Request) -> None:
        """Reject a prompt with an id that is not in the vocabulary."""
        for message in request.messages:
            for part in message.parts:
                if isinstance(part, TokensPart) and (highest := max(part.ids, default=0)) >= self.model.vocab_size:
                    why = f"must hold token ids less than {self.model.vocab_size}, not {highest}"
                    raise InvalidArgument.of("messages", why)

    def _check_decisions(self, request: Request) -> None:
        """Reject typed questions that cannot be answered in one pass of this model."""
        if not request.decisions:
            return
        if not self.model.spec.decides:
            raise Unimplemented(decisions_unsupported(self.model.spec.name))

    def _check_reduction(self, request: Request) -> None:
        """Reject a reduction of K/V that is incompatible with this model or with other options of the request."""
        if reduction_of(request) is None:
            return
        name = self.model.spec.name
        if not self.model.spec.causal:
            raise Unimplemented(f"model {name!r} reduces no K/V: only autoregressive models never run a position again")
        if not self.reads_pages:
            raise Unimplemented(f"model {name!r} reduces no K/V here: the server has [engine] sparse_* or kv_bits")
        if not self._even:
            raise Unimplemented(f"model {name!r} reduces no K/V: {UNEVEN}")
        if request.diffusion.recompute.name != "last":
            raise InvalidArgument.of("diffusion.recompute", "must be 'last' with kv_reduction")
        if request.diffusion.commit.name in DRAFTING:
            raise InvalidArgument.of("diffusion.commit", "must not be a policy that drafts with kv_reduction")

    def _check_adapter(self, request: Request) -> None:
        """Reject an adapter in combination with options that use the model's base weights."""
        if not request.adapter:
            return
        if request.image_reuse is not None:
            raise InvalidArgument.of("image_reuse", "must not be set with an adapter: the K/V are those of the model")
        if isinstance(self.model, LoadedModel) and self.model.vision is not None:
            seen = self.model.vision.evidence
            if request.vision.pruner not in ("none", *pruners_for(seen)):
                raise InvalidArgument.of("vision.pruner", "must not be one that asks the decoder with an adapter")

    def _check_template_options(self, request: Request) -> None:
        """Reject variables that are not used by the model's chat template."""
        if not request.template_options:
            return
        if request.raw:
            raise InvalidArgument.of("template_options", "must be empty with raw, which has no chat template")
        known = template_options(self.model.tokenizer, tools=request.tools is not None)
        for name in json.loads(request.template_options):
            if name not in known:
                has = f"it reads {', '.join(sorted(known))}" if known else "it reads none"
                raise InvalidArgument.of(
                    f"template_options.{name}", f"is no option of the model's chat template; {has}"
                )

    def _require(self, kind: str, asked: str, allowed: tuple[str, ...]) -> None:
        """Raise ``Unimplemented`` for a policy that exists but is not allowed for this model."""
        if exists(asked) and asked not in allowed:
            spec = self.model.spec
            raise Unimplemented(policy_unsupported(spec.name, kind, asked, allowed, diffusion=not spec.causal))

    @cached_property
    def _recompute_policies(self) -> tuple[str, ...]:
        if self.model.spec.renoising:
            return RENOISING
        return {
            Attention.FULL: FULL_ATTENTION,
            Attention.PREFIX: FULL_ATTENTION,
            Attention.BLOCK_CAUSAL: BLOCK_CAUSAL_ATTENTION,
            Attention.CAUSAL: CAUSAL_ATTENTION,
        }[self.model.spec.attention]

    @cached_property
    def _pruners(self) -> tuple[str, ...]:
        """Pruners whose evidence the tower or the decoder provides; none if a network manages its own K/V without
        gaps."""
        if self.model.vision is None or isinstance(self.model, CanvasModel):
            return ()
        return pruners_for(self.model.vision.evidence | shown_by(self.model))

    @cached_property
    def _commit_policies(self) -> tuple[str, ...]:
        model = self.model
        known: tuple[str, ...] = CAUSAL_COMMIT if model.spec.causal else DIFFUSION_COMMIT
        if model.spec.renoising is not None:
            known = RENOISING_COMMIT
        absent = ACCOMPANIED if model.companion is None else frozenset()
        if model.spec.draft_mask is not None and self.reads_pages:
            absent -= {"draft_model"}
        absent |= FILTERED if model.commit_filter is None else frozenset()
        absent |= frozenset() if self._drafts else DRAFTING
        added = ("scheduler",) if self._offered.schedulers else ()
        return (*(name for name in known if name not in absent), *added)


def rows_apart(engine: EngineConfig) -> bool:
    """Whether the rows of a decode pass affect neither the attention of others nor which K/V are kept at full
    precision; only then does a row of a draft, or of forced text, have the same result as in a separate pass, up to
    rounding."""
    return not (engine.sparse_decode in ("quest", "random") or engine.kv_kept)
