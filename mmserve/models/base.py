"""The interface of a loaded model: a spec of its properties, and its parts.

Policies and stages depend on the spec, never on the model's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from mmserve.core.attention_span import image_spans
from mmserve.core.decisions import Calibration
from mmserve.models.commit_filter import CommitFilter
from mmserve.models.decoder import Decoder
from mmserve.models.packed import count_weights
from mmserve.models.picture import VisionEncoder
from mmserve.models.policy_file import PolicyFile


class Attention(Enum):
    """The attention mask.

    Full (masked diffusion), prefix (full, but the prompt does not attend to the answer), up to the end of the row's own
    block, counted from position 0 (block diffusion), or causal (next token).
    """

    FULL = "full"
    PREFIX = "prefix"
    BLOCK_CAUSAL = "block_causal"
    CAUSAL = "causal"


@dataclass(frozen=True, kw_only=True)
class Renoising:
    """How a model denoises a canvas of random tokens: the values of its ``generation_config.json``."""

    steps: int  # maximum denoising steps of a canvas
    bound: float  # nats; see the commit policy ``entropy_bound``
    t_max: float  # temperature of the first step; it decreases linearly
    t_min: float  # limit that the temperature decreases to
    stable: int  # number of consecutive steps with unchanged predictions after which a canvas is final …
    confident: float  # … and if the mean entropy of a position (nats) is below this


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The properties of a model. Token ids come from its checkpoint."""

    name: str
    architecture: str
    attention: Attention
    mask_id: int  # token of open positions; with causal attention it is never run
    end_ids: frozenset[int]  # each of them ends the answer
    padding_id: int | None = None  # end token that pads a canvas after an answer's end; None = the token that ended it
    banned_ids: tuple[int, ...]  # never generated: mask, placeholders, and tokens that the checkpoint suppresses
    image_id: int | None  # placeholder of an image, possibly beyond the embeddings; None = text only
    video_id: int | None = None  # placeholder of a video; None = no videos
    max_tokens: int  # maximum positions of the checkpoint
    max_canvas: int = 0  # most new tokens on which the model answers well; 0 = any
    default_block_length: int = 32  # for masked diffusion; with block-causal attention, its block length
    sub_block: int = 0  # default number of positions filled together within a block; 0 = all
    renoising: Renoising | None = None  # set if open positions hold random tokens, in whole blocks, instead of masks
    draft_mask: int | None = None  # mask of blocks that a next-token model fills itself; None = it does not
    draft_block: int = 32  # length of those blocks
    draft_shift: int = 0  # offset to the left of the row whose logits predict one of these masks
    whole_images: bool = False  # adjacent visual tokens attend to each other despite causal attention
    special_tokens: bool = False  # the tokenizer adds special tokens to a prompt whose template lacks the first
    logit_shift: int = 0  # offset to the left of a position's row of logits: 1 for next-token models and Dream

    def __post_init__(self) -> None:
        if self.causal and self.logit_shift < 1:
            raise ValueError("a position cannot be predicted from itself where attention is causal")

    @property
    def causal(self) -> bool:
        """Whether the model decodes left to right, one token a step."""
        return self.attention is Attention.CAUSAL

    def attention_spans(self, ids: np.ndarray) -> np.ndarray | None:
        """Int64 ``[N]``: how many positions each of a prompt's ``ids`` attends to, if ``whole_images``; else None."""
        return image_spans(ids, self.image_id) if self.whole_images and self.image_id is not None else None

    def block_length(self, asked: int = 0) -> int:
        """The block length of a request that ``asked`` for this many positions (0 = the default)."""
        if self.renoising is not None:
            return self.default_block_length
        if self.causal:
            return 1
        return asked or self.sub_block or self.default_block_length

    @property
    def decides(self) -> bool:
        """Whether the model can answer typed questions: slots must be masked, or predicted by the row before."""
        return self.renoising is None

    @property
    def chunked(self) -> bool:
        """Whether a prompt can be prefilled in chunks: no position attends beyond its own block."""
        return self.attention_block is not None

    @property
    def attention_block(self) -> int | None:
        """The block length of block-causal attention (1 = causal), counted from position 0; None = attention without
        blocks."""
        return {Attention.CAUSAL: 1, Attention.BLOCK_CAUSAL: self.default_block_length}.get(self.attention)


class EncoderModel(Protocol):
    """The part of a model that encode needs: tower, tokenizer, and the format of its decoder's input."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def vision(self) -> VisionEncoder | None: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def companion(self) -> EncoderModel | None: ...
    @property
    def position_axes(self) -> int: ...
    @property
    def deep_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def width(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class EncoderOnly:
    """A model without its decoder, for a process that only encodes."""

    spec: ModelSpec
    tokenizer: PreTrainedTokenizerBase
    vision: VisionEncoder | None
    dtype: torch.dtype
    device: torch.device
    companion: EncoderOnly | None
    position_axes: int
    deep_layers: int
    vocab_size: int
    width: int

    @classmethod
    def of(cls, model: EncoderModel) -> Self:
        """The encoding part of ``model``; its decoder's weights are freed once nothing else refers to them."""
        values = {each.name: getattr(model, each.name) for each in fields(cls)}
        return cls(**values | {"companion": None if model.companion is None else cls.of(model.companion)})


#: Matrix products with a model's weights, one of each shape and kind, with the width of their input rows.
Products = Sequence[tuple[int, Callable[[Tensor], Tensor]]]


@dataclass(frozen=True)
class OpenCanvas:
    """A canvas of random tokens, the input of a step."""

    tokens_L: Tensor  # int64
    past: Any  # the network's K/V cache of everything before it
    before_LV: Tensor | None  # shaped logits of the previous step; None in the first


class CanvasNetwork(Protocol):
    """The network of a model that denoises canvases of random tokens; it has its own K/V cache for each request.

    Its output for a canvas does not depend on the other canvases of a call.
    """

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the logits, and of the noise."""
        ...

    @property
    def width(self) -> int:
        """Embedding size."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its weights."""
        ...

    def products(self) -> Products:
        """The matrix products of ``predict``."""
        ...

    def set_row_floor(self, rows: int) -> None:
        """Pad the matrix products of ``predict`` to at least ``rows`` rows, so that no result depends on their
        number."""
        ...

    def read(self, ids_n: Tensor, past: Any | None, features: Tensor | None = None) -> Any:
        """Prefill final tokens ``ids_n`` (int64) after ``past`` (None = empty). Returns the extended cache.

        ``features``: the visual tokens ``[n, D]`` at the image placeholders of ``ids_n``.
        """
        ...

    def predict(self, canvases: list[OpenCanvas]) -> list[Tensor]:
        """Logits (fp32 ``[L, V]``) of each canvas; all canvases have the same length."""
        ...

    def held(self, past: Any) -> dict[str, Tensor]:
        """The K/V of ``past`` by name, for another process; ``past`` is not modified."""
        ...

    def past_of(self, held: Mapping[str, Tensor], positions: int) -> Any:
        """The cache of ``positions`` positions from ``held``. Raises ``TransferError`` if shapes or dtypes differ."""
        ...


@dataclass(frozen=True)
class CanvasModel:
    """A model in memory whose ``spec`` has ``renoising``."""

    spec: ModelSpec
    network: CanvasNetwork
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    device: torch.device
    vision: VisionEncoder | None = None
    policies: PolicyFile | None = None
    stored: str = ""  # its checkpoints are not quantised

    @property
    def companion(self) -> None:
        """None: a companion predicts open positions one by one, but here none is final before all are."""

    @property
    def commit_filter(self) -> None:
        """None: the model itself determines when a canvas is final."""

    @property
    def position_axes(self) -> int:
        """Number of position axes: 1."""
        return 1

    @property
    def deep_layers(self) -> int:
        """Number of layers that add visual features: 0."""
        return 0

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the logits."""
        return self.network.vocab_size

    @property
    def width(self) -> int:
        """Size of an embedding, and of a visual token."""
        return self.network.width

    @property
    def parameters(self) -> int:
        """Number of parameters of the network."""
        return sum(p.numel() for p in self.network.parameters())


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. ``tokenizer`` has a chat template; ``vision`` is None for text-only models.

    ``companion``: a causal model with the same tokens, which drafts or verifies. ``commit_filter``: for the commit
    policy ``learned``; None if none was trained. ``policies``: the measured default policies; None if not measured.
    ``calibration``: of the probabilities of typed questions. ``stored``: the checkpoint's quantised format; empty if it
    is not quantised. ``adapters``: the checkpoint's folder with adapters in subfolders; None if there is none.
    """

    spec: ModelSpec
    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase
    vision: VisionEncoder | None
    dtype: torch.dtype
    device: torch.device
    companion: LoadedModel | None = None
    commit_filter: CommitFilter | None = None
    policies: PolicyFile | None = None
    calibration: Calibration = field(default_factory=Calibration)
    stored: str = ""
    adapters: Path | None = None

    @property
    def position_axes(self) -> int:
        """Number of position axes: 1, or 3 if images have row and column positions."""
        return self.decoder.config.position_axes

    @property
    def deep_layers(self) -> int:
        """Number of layers, from the first, that add visual features (DeepStack)."""
        return self.decoder.config.deep_layers

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the logits."""
        return self.decoder.config.vocab_size

    @property
    def width(self) -> int:
        """Size of a visual token: an embedding, and the features that the decoder's first layers add."""
        return self.decoder.config.hidden_size * (1 + self.decoder.config.deep_layers)

    @property
    def parameters(self) -> int:
        """Number of parameters of decoder, tower and projector."""
        modules = [self.decoder, *([self.vision] if self.vision is not None else [])]
        return sum(map(count_weights, modules))


#: A model that the registry loads and an engine serves.
Model = LoadedModel | CanvasModel
