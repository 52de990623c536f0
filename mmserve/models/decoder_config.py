"""The configuration of a decoder: its dimensions, and its differences from LLaMA."""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.models.moe import MoEConfig
from mmserve.models.rope_scaling import RopeScaling

#: Error text for features that need ``plain_attention``.
UNEVEN = "some of its layers see a sliding window, or its scores are capped"


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Dimensions and switches of a decoder; every number comes from a checkpoint's ``config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    local_theta: float = 0.0  # base in layers with a window, unscaled; 0 = the same base
    rotary_width: int = 0  # number of leading dimensions of a head that are rotated; 0 = all
    rope_axes: tuple[int, ...] = ()  # position axis of each frequency; () = a single axis
    deep_layers: int = 0  # number of first layers that add visual features (``DeepRows``)
    rms_norm_eps: float = 1e-5
    max_positions: int = 4096
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    moe: MoEConfig | None = None  # experts instead of the feed-forward
    windows: tuple[int, ...] = ()  # sliding window of each layer, including the row's own position; 0 = none
    activation: str = "silu"
    score_cap: float = 0.0  # scores become ``cap * tanh(score / cap)``; 0 = not capped
    logit_cap: float = 0.0  # the same of logits
    query_scale: float = 1.0  # factor of queries, in addition to ``head_dim ** -0.5``
    embed_scale: float = 1.0  # factor of token embeddings
    output_norms: bool = False  # norms of the outputs of attention and feed-forward (Gemma 2)
    unit_offset: bool = False  # checkpoints store norm weights minus 1 (Gemma)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head size {self.head_dim} is odd: rotary embedding pairs its halves")
        if self.rotary_width % 2 or self.rotary_width > self.head_dim:
            raise ValueError(f"{self.rotary_width} dimensions of {self.head_dim} cannot be rotated in pairs")
        if self.rope_axes and 2 * len(self.rope_axes) != (self.rotary_width or self.head_dim):
            raise ValueError(f"axes of {len(self.rope_axes)} frequencies do not fit heads of {self.head_dim}")
        if self.rope_scaling is not None:
            self.rope_scaling.check((self.rotary_width or self.head_dim) // 2)
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers")
        if self.deep_layers > self.num_layers:
            raise ValueError(f"visual features for {self.deep_layers} layers, but there are only {self.num_layers}")

    @property
    def position_axes(self) -> int:
        """Number of position axes: 3 for M-RoPE."""
        return max(self.rope_axes, default=0) + 1

    @property
    def plain_attention(self) -> bool:
        """Whether all layers have the same attention: global, with uncapped scores and one rotary table."""
        windows = map(self.window, range(len(self.windows)))
        return not (any(windows) or self.score_cap or self.local_theta)

    def window(self, layer: int) -> int:
        """The sliding window of ``layer``; 0 = none. A window of at least the maximum length counts as none, unless its
        layers have their own base."""
        window = self.windows[layer] if self.windows else 0
        return window if window < self.max_positions or self.local_theta else 0
