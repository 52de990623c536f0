"""What a loaded model is to the rest of the server: a spec of what it can do, and its parts.

Policies and stages ask the spec, never the model's name.
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

from mmserve.core.decisions import Calibration
from mmserve.core.sight import image_sight
from mmserve.models.commit_filter import CommitFilter
from mmserve.models.decoder import Decoder
from mmserve.models.packed import count_weights
from mmserve.models.picture import VisionEncoder
from mmserve.models.policy_file import PolicyFile


class Attention(Enum):
    """How far right a position may look.

    To the end of the canvas (masked diffusion; or, where attention is of the prefix, to the prompt's end as long as it
    stands within the prompt), to the end of its own block, counted from position 0 (block diffusion), or to itself
    (next token).
    """

    FULL = "full"
    PREFIX = "prefix"
    BLOCK_CAUSAL = "block_causal"
    CAUSAL = "causal"


@dataclass(frozen=True, kw_only=True)
class Renoising:
    """How a model denoises a canvas of random tokens: the numbers of its ``generation_config.json``."""

    steps: int  # most denoising steps a canvas
    bound: float  # nats; see the commit policy ``entropy_bound``
    t_max: float  # temperature of the first step; it falls evenly
    t_min: float  # what it falls towards
    stable: int  # a canvas is final once as many steps in a row predict the same as the one before …
    confident: float  # … and the mean entropy of a position (nats) is below this


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a model is. Token ids come from its checkpoint."""

    name: str
    architecture: str
    attention: Attention
    mask_id: int  # the token of open positions; where attention is causal, no pass ever sees it
    end_ids: frozenset[int]  # any of them ends the answer
    padding_id: int | None = None  # one of them that fills the canvas after an answer's end; None = whatever ended it
    banned_ids: tuple[int, ...]  # never generated: mask, placeholders, and what the checkpoint lists
    image_id: int | None  # placeholder of an image in the token row, maybe past the embeddings; None = text only
    video_id: int | None = None  # placeholder of a video; None = takes none
    max_tokens: int  # positions the checkpoint was made for
    default_block_length: int = 32  # of masked diffusion; where attention is block-causal, its blocks
    sub_block: int = 0  # positions that are filled together within a block by default; 0 = all of it
    renoising: Renoising | None = None  # set where open positions hold random tokens, in whole blocks, and no mask
    draft_mask: int | None = None  # the mask of blocks that a next-token model fills by itself; None = it fills none
    draft_block: int = 32  # positions of those blocks
    draft_shift: int = 0  # how far left of one of their masks the row is whose logits predict it
    whole_images: bool = False  # visual tokens beside one another see each other, though attention is causal
    special_tokens: bool = False  # the tokenizer's go around a prompt whose template does not begin with its first
    logit_shift: int = 0  # how far left of a position its row of logits is: 1 for next-token models and Dream

    def __post_init__(self) -> None:
        if self.causal and self.logit_shift < 1:
            raise ValueError("a position cannot be predicted from itself where attention is causal")

    @property
    def causal(self) -> bool:
        """Whether the model decodes left to right, one token a step."""
        return self.attention is Attention.CAUSAL

    def sight(self, ids: np.ndarray) -> np.ndarray | None:
        """Int64 ``[N]``: how many positions each of a prompt's ``ids`` sees, where ``whole_images``; else None."""
        return image_sight(ids, self.image_id) if self.whole_images and self.image_id is not None else None

    def block_length(self, asked: int = 0) -> int:
        """Positions that are decoded together where a request ``asked`` for so many (0 = the default)."""
        if self.renoising is not None:
            return self.default_block_length
        if self.causal:
            return 1
        return asked or self.sub_block or self.default_block_length

    @property
    def decides(self) -> bool:
        """Whether the model answers typed questions: their slots are masked, or predicted by the row before."""
        return self.renoising is None

    @property
    def chunked(self) -> bool:
        """Whether a prompt can be prefilled in chunks: no position sees anything right of its own block."""
        return self.attention_block is not None

    @property
    def attention_block(self) -> int | None:
        """Length of the blocks, counted from position 0, that bound a position's sight; None = no block does."""
        return {Attention.CAUSAL: 1, Attention.BLOCK_CAUSAL: self.default_block_length}.get(self.attention)


class EncoderModel(Protocol):
    """What encode needs of a model: its tower, its tokens, and the form of what its decoder takes."""

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
    """A model without its decoder, for a process that encodes and does nothing else."""

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
        """The part of ``model`` that encodes; its decoder's weights are free once nothing else refers to them."""
        values = {each.name: getattr(model, each.name) for each in fields(cls)}
        return cls(**values | {"companion": None if model.companion is None else cls.of(model.companion)})


#: Products of rows with a model's weights, one of each shape and kind, and the width of the rows that each takes.
Products = Sequence[tuple[int, Callable[[Tensor], Tensor]]]


@dataclass(frozen=True)
class OpenCanvas:
    """A canvas of random tokens before a step."""

    tokens_L: Tensor  # int64
    past: Any  # what the network keeps of everything before it
    before_LV: Tensor | None  # shaped logits of the step before; None at the first


class CanvasNetwork(Protocol):
    """The network of a model that denoises canvases of random tokens; it keeps its own K/V, one cache a request.

    Its output for a canvas does not depend on the other canvases of a call.
    """

    @property
    def vocab_size(self) -> int:
        """Logits of a position; noise is drawn from as many tokens."""
        ...

    @property
    def width(self) -> int:
        """Elements of an embedding."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its weights."""
        ...

    def products(self) -> Products:
        """What ``predict`` multiplies rows with."""
        ...

    def set_row_floor(self, rows: int) -> None:
        """No product of ``predict`` shall have fewer rows: with more, none depends on how many there are."""
        ...

    def read(self, ids_n: Tensor, past: Any | None, features: Tensor | None = None) -> Any:
        """``past`` (None = nothing yet) with final tokens (int64) added after it.

        ``features``: the visual tokens ``[n, D]`` at the image placeholders of ``ids_n``.
        """
        ...

    def predict(self, canvases: list[OpenCanvas]) -> list[Tensor]:
        """Logits (fp32 ``[L, V]``) of each canvas, all of one length."""
        ...

    def held(self, past: Any) -> dict[str, Tensor]:
        """The K/V of ``past`` by name, for another process; ``past`` stays as it is."""
        ...

    def past_of(self, held: Mapping[str, Tensor], positions: int) -> Any:
        """What ``held`` was of, after so many ``positions``. Raises ``TransferError`` where it is of another form."""
        ...


@dataclass(frozen=True)
class CanvasModel:
    """A checkpoint in memory whose ``spec`` is renoising."""

    spec: ModelSpec
    network: CanvasNetwork
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    device: torch.device
    vision: VisionEncoder | None = None
    policies: PolicyFile | None = None
    stored: str = ""  # its checkpoints are plain

    @property
    def companion(self) -> None:
        """None: a companion predicts open positions, and here no position is open until all are final."""

    @property
    def commit_filter(self) -> None:
        """None: the model itself reports when a canvas is final."""

    @property
    def position_axes(self) -> int:
        """Axes of a position: one."""
        return 1

    @property
    def deep_layers(self) -> int:
        """Layers that take visual tokens beside the embedding: none."""
        return 0

    @property
    def vocab_size(self) -> int:
        """Logits of a position."""
        return self.network.vocab_size

    @property
    def width(self) -> int:
        """Elements of an embedding, and of a visual token."""
        return self.network.width

    @property
    def parameters(self) -> int:
        """Parameters of the network."""
        return sum(p.numel() for p in self.network.parameters())


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory. ``tokenizer`` has a chat template; ``vision`` is None for text-only models.

    ``companion``: a causal model with the same tokens, that drafts or judges for this one.
    ``commit_filter``: what the commit policy ``learned`` asks, None where none was trained.
    ``policies``: the default policies that were measured for it, None where none were.
    ``calibration``: of the probabilities of typed questions.
    ``stored``: the quantised form that its checkpoint has the weights in; empty where they are plain.
    ``adapters``: the folder of its checkpoint whose subfolders are adapters of it, None where there is none.
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
        """Axes of a position: one, or three where images have rows and columns."""
        return self.decoder.config.position_axes

    @property
    def deep_layers(self) -> int:
        """Layers that take visual tokens beside the embedding, from the first on."""
        return self.decoder.config.deep_layers

    @property
    def vocab_size(self) -> int:
        """Logits of a position."""
        return self.decoder.config.vocab_size

    @property
    def width(self) -> int:
        """Elements of a visual token: an embedding, and what each of the decoder's first layers takes beside."""
        return self.decoder.config.hidden_size * (1 + self.decoder.config.deep_layers)

    @property
    def parameters(self) -> int:
        """Parameters of decoder, tower and projector."""
        modules = [self.decoder, *([self.vision] if self.vision is not None else [])]
        return sum(map(count_weights, modules))


#: What a registry loads and an engine serves.
Model = LoadedModel | CanvasModel
