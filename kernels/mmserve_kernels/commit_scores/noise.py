"""Gumbel noise from a seed and a token id, bitwise equal on every device.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) generates the random integers; the
logarithms are computed with additions and multiplications of fp32, each rounded separately, because the ``log`` of
devices differs in the last bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Multipliers of the two halves of a round, and the increments of the key's halves after each.
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_WORD = 0xFFFFFFFF

#: log(1 + x) = x - x²/2 + x³ · this polynomial in x, for x in [√½ - 1, √2 - 1]: of the Cephes library's ``logf``.
LOG_TERMS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
#: log 2 in two parts, so that whole multiples of the first are exact.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
#: Bits of fp32 √½: where the mantissas of ``_split`` begin, so that they lie around 1.
SQRT_HALF_BITS = 0x3F3504F3
ONE_BITS = 0x3F800000
#: Largest fp32 below 1.
LARGEST = 1 - 2.0**-24


def philox(seeds_r: Tensor, counters_c: Tensor) -> Tensor:
    """Random integers ``[r, c, 4]`` (int64, below 2³²) of each seed (int64 ``[r]``) at each counter (int64 ``[c]``)."""
    key_a, key_b = (seeds_r & _WORD)[:, None], (seeds_r >> 32 & _WORD)[:, None]
    a = counters_c.expand(len(seeds_r), -1)
    b = c = d = torch.zeros_like(a)
    for _ in range(_ROUNDS):
        left, right = a * ROUND_A, c * ROUND_B  # the 64 bits are correct, except for the sign
        a, b = (right >> 32 & _WORD).bitwise_xor_(b).bitwise_xor_(key_a), right.bitwise_and_(_WORD)
        c, d = (left >> 32 & _WORD).bitwise_xor_(d).bitwise_xor_(key_b), left.bitwise_and_(_WORD)
        key_a, key_b = key_a + _KEY_A & _WORD, key_b + _KEY_B & _WORD
    return torch.stack((a, b, c, d), -1)


def gumbel(seeds_r: Tensor, tokens: int) -> Tensor:
    """Noise ``[r, tokens]`` (fp32) of each seed (int64 ``[r]``): a token's is of word id % 4 at counter id // 4."""
    counters = torch.arange(-(-tokens // 4), device=seeds_r.device)
    u = philox(seeds_r, counters).flatten(1)[:, :tokens].float()
    u = u.add_(0.5).mul_(2.0**-32).clamp_max_(LARGEST)
    rest = 1 - u
    lost = (rest - 1).add_(u)  # rounding error of 1 - u, which is large relative to a small u
    return _log(lost.sub_(_log(rest))).neg_()


def _log(y: Tensor) -> Tensor:
    """log of positive normal fp32 numbers, with every product and sum rounded separately."""
    bits = y.view(torch.int32) + (ONE_BITS - SQRT_HALF_BITS)
    exponent = (bits >> 23).sub_(127).float()
    x = bits.bitwise_and_(0x7FFFFF).add_(SQRT_HALF_BITS).view(torch.float32) - 1
    squared = x * x
    series = x * LOG_TERMS[0]
    for term in LOG_TERMS[1:-1]:
        series.add_(term).mul_(x)
    series.add_(LOG_TERMS[-1]).mul_(x).mul_(squared)
    series.add_(exponent * LN2_LOW).sub_(squared.mul_(0.5))
    return x.add_(series).add_(exponent.mul_(LN2_HIGH))
