"""The Triton kernel of ``commit_scores``.

A row is divided into chunks of the vocabulary, a program each, so that few rows still fill a GPU; a second kernel
merges the chunks of a row. The division depends on the vocabulary only, so a row's result is bitwise equal in any
batch.

The top-k tokens are represented as 64-bit keys: 32 bits that sort like the logit, above 31 bits that sort like the id
in descending order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmserve_kernels.aot import Variant
from mmserve_kernels.commit_scores import noise
from mmserve_kernels.commit_scores.types import LARGEST_K, CommitScores, Draw, check, empty

#: Tokens of a chunk: 16 a thread, whose keys use a quarter of its registers.
_CHUNK = 4096
_WARPS, _JOIN_WARPS = 8, 4

_ROUND_A, _ROUND_B = tl.constexpr(noise.ROUND_A), tl.constexpr(noise.ROUND_B)
_SQRT_HALF_BITS, _ONE_BITS = tl.constexpr(noise.SQRT_HALF_BITS), tl.constexpr(noise.ONE_BITS)
_LN2_HIGH, _LN2_LOW = tl.constexpr(noise.LN2_HIGH), tl.constexpr(noise.LN2_LOW)
_LARGEST_U = tl.constexpr(noise.LARGEST)
_LOG_TERMS = tl.constexpr(noise.LOG_TERMS)
_LOWEST_KEY = tl.constexpr(-(2**63))
_LARGEST_FLOAT = tl.constexpr(torch.finfo(torch.float32).max)


def commit_scores(
    logits_nV: Tensor,
    k: int = 1,
    *,
    banned: Tensor | None = None,
    allowed: Tensor | None = None,
    draw: Draw | None = None,
    mask_id: int | None = None,
) -> CommitScores:
    """See ``reference.commit_scores``; ids and sampled tokens are equal, the other outputs up to rounding."""
    check(logits_nV, k, banned, allowed, draw, mask_id)
    rows, vocabulary = logits_nV.shape
    out = empty(rows, k, logits_nV.device)
    if rows == 0:
        return out
    logits_nV = logits_nV if logits_nV.stride(1) == 1 else logits_nV.contiguous()
    width = max(k, 2)  # the gap is between the top two
    chunk = chunk_size(vocabulary)
    chunks = triton.cdiv(vocabulary, chunk)
    sums = out.gap.new_empty(rows, chunks, 3)
    keys = out.ids.new_empty(rows, chunks, width)
    drawn = out.ids.new_empty(rows, chunks)
    _chunk[(rows, chunks)](  # rows are axis 0: axis 1 is limited to 65,535 programs
        logits_nV,
        logits_nV.stride(0),
        vocabulary,
        None if banned is None else banned.contiguous(),
        0 if banned is None else len(banned),
        None if allowed is None else allowed.contiguous(),
        None if draw is None else draw.seeds.contiguous(),
        None if draw is None else draw.inverse(),
        None if draw is None else draw.noise(),
        sums,
        keys,
        drawn,
        mask_id,
        width,
        CHUNK=chunk,
        SHAPED=draw is not None and draw.shaped,
        num_warps=_WARPS,
        enable_fp_fusion=False,  # fused multiply-add would change the noise
    )
    _join[(rows,)](
        sums,
        keys,
        drawn,
        logits_nV,
        logits_nV.stride(0),
        None if draw is None or not draw.shaped else draw.inverse(),
        *(out.ids, out.log_probs, out.gap, out.entropy, out.tokens, out.token_log_probs),
        mask_id,
        chunks,
        k,
        width,
        CHUNKS=triton.next_power_of_2(chunks),
        KEYS=triton.next_power_of_2(chunks * width),
        DRAW=draw is not None,
        num_warps=_JOIN_WARPS,
    )
    return out


def chunk_size(vocabulary: int) -> int:
    """Tokens of a chunk, a power of two."""
    return max(16, min(_CHUNK, triton.next_power_of_2(vocabulary)))


def variants() -> Iterator[Variant]:
    """Every launch configuration of the kernels, for vocabularies above a chunk and the maximum k."""
    for name in ("fp32", "fp16", "bf16"):
        for options in ("plain", "masked", "drawn", "shaped", "all"):
            yield _chunk_variant(name, options)
    for options in ("plain", "drawn", "shaped"):
        drawn = {"logits": "*bf16", "inverse": "*fp32" if options == "shaped" else "constexpr"}
        real = ("sums", "log_probs_out", "gap_out", "entropy_out", "token_log_probs_out")
        whole = ("keys", "drawn", "ids_out", "tokens_out")
        types = {**drawn, **dict.fromkeys(real, "*fp32"), **dict.fromkeys(whole, "*i64")}
        types |= dict.fromkeys(("row_stride", "chunks", "k", "width", "mask_id"), "i32")
        constants: dict[str, object] = {} if options == "shaped" else {"inverse": None}
        constants |= {"CHUNKS": 64, "KEYS": 64 * LARGEST_K, "DRAW": options != "plain"}
        yield Variant(f"join {options}", _join, types, constants, num_warps=_JOIN_WARPS)


def _chunk_variant(dtype: str, options: str) -> Variant:
    """``_chunk`` over logits of Triton's ``dtype``; ``options``: plain, masked, drawn, shaped or all."""
    types = {"logits": f"*{dtype}", "sums": "*fp32", "keys": "*i64", "drawn": "*i64"}
    types |= dict.fromkeys(("row_stride", "vocabulary", "n_banned", "width", "mask_id"), "i32")
    present = {"masked": {"banned": "*i64", "allowed": "*i32"}}
    present["drawn"] = present["shaped"] = {"seeds": "*i64", "inverse": "*fp32", "loud": "*fp32"}
    present["all"] = present["masked"] | present["shaped"]
    types |= present.get(options, {})
    absent = {"banned", "allowed", "seeds", "inverse", "loud"} - set(types)
    constants = {**dict.fromkeys(absent), "CHUNK": _CHUNK, "SHAPED": options in ("shaped", "all")}
    return Variant(f"chunk {dtype} {options}", _chunk, types, constants, num_warps=_WARPS, fp_fusion=False)


@triton.jit
def _log(y):
    """The logarithm of ``noise.py``, operation for operation."""
    bits = y.to(tl.int32, bitcast=True) + (_ONE_BITS - _SQRT_HALF_BITS)
    exponent = ((bits >> 23) - 127).to(tl.float32)
    x = ((bits & 0x7FFFFF) + _SQRT_HALF_BITS).to(tl.float32, bitcast=True) - 1.0
    squared = x * x
    series = x * _LOG_TERMS[0]
    for i in tl.static_range(1, 8):
        series = (series + _LOG_TERMS[i]) * x
    series = (series + _LOG_TERMS[8]) * x * squared
    series = series + exponent * _LN2_LOW - squared * 0.5
    return x + series + exponent * _LN2_HIGH


@triton.jit
def _gumbel(seed, first, COUNT: tl.constexpr):
    """The noise of ``noise.py`` for the tokens ``first`` (a multiple of 4) to ``first + COUNT``."""
    a, b, c, d = tl.randint4x(seed, first // 4 + tl.arange(0, COUNT // 4))
    words = tl.join(tl.join(a, c), tl.join(b, d)).reshape(COUNT)
    u = tl.minimum((words.to(tl.float32) + 0.5) * (2.0**-32), _LARGEST_U)
    rest = 1.0 - u
    lost = (rest - 1.0) + u
    return -_log(lost - _log(rest))


@triton.jit
def _key(values, ids):
    """int64 that sorts like ``values`` (fp32), with ties in ascending order of ids; ids are 0 to 2³¹ - 1."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _value(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _token(key):
    """The id of a key, -1 if its value is -inf."""
    token = 0x7FFFFFFF - (key & 0x7FFFFFFF)
    return tl.where(_value(key) == float("-inf"), -1, token)


@triton.jit
def _finite(x):
    """fp32 logits with NaN replaced by -inf, and +inf by the largest number."""
    x = x.to(tl.float32)
    return tl.where(x == x, tl.minimum(x, _LARGEST_FLOAT), float("-inf"))


@triton.jit
def _chunk(
    logits,  # [n, V], any float
    row_stride,
    vocabulary,
    banned,  # int64 [n_banned], or None
    n_banned,
    allowed,  # int32 [n, ceil(V / 32)], or None
    seeds,  # int64 [n], or None: nothing is drawn
    inverse,  # fp32 [n]
    loud,  # fp32 [n]
    sums,  # fp32 [n, chunks, 3]: the largest, Σ exp(x - largest), Σ exp(x - largest) (x - largest)
    keys,  # int64 [n, chunks, width], best first
    drawn,  # int64 [n, chunks]
    mask_id,  # never chosen; or None
    width,
    CHUNK: tl.constexpr,
    SHAPED: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    there = ids < vocabulary
    x = _finite(tl.load(logits + row * row_stride + ids, mask=there, other=float("-inf")))
    if allowed is not None:
        words = tl.load(allowed + row * ((vocabulary + 31) // 32) + ids // 32, mask=there, other=0)
        x = tl.where((words >> (ids % 32)) & 1 != 0, x, float("-inf"))
    if banned is not None:
        for i in range(n_banned):
            x = tl.where(ids == tl.load(banned + i), float("-inf"), x)
    if mask_id is not None:
        x = tl.where(ids == mask_id, float("-inf"), x)
    at = row * chunks + chunk
    if seeds is not None:
        tempered = x * tl.load(inverse + row)
        if SHAPED:
            x = tl.minimum(tempered, _LARGEST_FLOAT)
        noise = _gumbel(tl.load(seeds + row), chunk * CHUNK, CHUNK) * tl.load(loud + row)
        tl.store(drawn + at, tl.max(_key(tempered + noise, ids), 0))
    largest = tl.max(x, 0)
    under = x - tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp(under)  # exactly 0 for -inf
    tl.store(sums + at * 3, largest)
    tl.store(sums + at * 3 + 1, tl.sum(weights, 0))
    tl.store(sums + at * 3 + 2, tl.sum(weights * tl.where(x == float("-inf"), 0.0, under), 0))
    left = _key(x, ids)
    for i in range(width):
        best = tl.max(left, 0)
        tl.store(keys + at * width + i, best)
        left = tl.where(left == best, _LOWEST_KEY, left)


@triton.jit
def _joined_sums(sums, row, chunks, CHUNKS: tl.constexpr):
    """The largest logit, the logsumexp and the entropy of a row, from the ``sums`` of its chunks."""
    i = tl.arange(0, CHUNKS)
    at = (row * chunks + i) * 3
    largest = tl.load(sums + at, mask=i < chunks, other=float("-inf"))
    best = tl.max(largest, 0)
    nothing = best == float("-inf")
    shift = largest - tl.where(nothing, 0.0, best)
    weight = tl.exp(shift)
    total = weight * tl.load(sums + at + 1, mask=i < chunks, other=0.0)
    moment = weight * tl.load(sums + at + 2, mask=i < chunks, other=0.0)
    moment = tl.sum(moment + total * tl.where(shift == float("-inf"), 0.0, shift), 0)
    total = tl.where(nothing, 1.0, tl.sum(total, 0))
    log_total = tl.log(total)
    log_z = tl.where(nothing, 0.0, best) + log_total
    return best, log_z, tl.where(nothing, 0.0, log_total - moment / total)


@triton.jit
def _with_mask(log_z, entropy, mask):
    """The logsumexp and the entropy with one more outcome, of logit ``mask``."""
    highest = tl.maximum(log_z, mask)
    whole = highest + tl.log(1.0 + tl.exp(tl.minimum(log_z, mask) - highest))
    kept, p = log_z - whole, tl.exp(mask - whole)
    return whole, tl.exp(kept) * (entropy - kept) + p * (whole - tl.where(p > 0.0, mask, 0.0))


@triton.jit
def _store_best(keys, row, chunks, k, width, best, log_z, ids_out, log_probs_out, KEYS: tl.constexpr):
    """Stores the ``k`` best tokens of a row, from the ``keys`` of its chunks; ``best`` is its largest logit. Returns
    the key of the best token, and the logit of the second best (``best`` if ``width`` is 1)."""
    j = tl.arange(0, KEYS)
    left = tl.load(keys + row * chunks * width + j, mask=j < chunks * width, other=_LOWEST_KEY)
    first = tl.max(left, 0)
    second = best
    for n in range(width):
        key = tl.max(left, 0)
        left = tl.where(left == key, _LOWEST_KEY, left)
        value = _value(key)
        tl.store(ids_out + row * k + n, _token(key), mask=n < k)
        tl.store(log_probs_out + row * k + n, value - log_z, mask=n < k)
        second = tl.where(n == 1, value, second)
    return first, second


@triton.jit
def _join(
    sums,
    keys,
    drawn,
    logits,
    row_stride,
    inverse,  # fp32 [n]; None = outputs of the unscaled logits
    ids_out,  # int64 [n, k]
    log_probs_out,  # fp32 [n, k]
    gap_out,  # fp32 [n]
    entropy_out,  # fp32 [n]
    tokens_out,  # int64 [n]
    token_log_probs_out,  # fp32 [n]
    mask_id,  # its logit is part of the distribution; or None
    chunks,
    k,
    width,
    CHUNKS: tl.constexpr,
    KEYS: tl.constexpr,
    DRAW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    best, log_z, entropy = _joined_sums(sums, row, chunks, CHUNKS)
    mask = float("-inf")
    if mask_id is not None:
        mask = _finite(tl.load(logits + row * row_stride + mask_id))
        if inverse is not None:
            mask = tl.minimum(mask * tl.load(inverse + row), _LARGEST_FLOAT)
        log_z, entropy = _with_mask(log_z, entropy, tl.where(best == float("-inf"), float("-inf"), mask))
    tl.store(entropy_out + row, entropy)
    first, second = _store_best(keys, row, chunks, k, width, best, log_z, ids_out, log_probs_out, KEYS)
    nothing = best == float("-inf")
    second = tl.maximum(second, mask)
    tl.store(gap_out + row, tl.where(nothing, 0.0, best - tl.where(nothing, 0.0, second)))
    if DRAW:
        i = tl.arange(0, CHUNKS)
        first = tl.max(tl.load(drawn + row * chunks + i, mask=i < chunks, other=_LOWEST_KEY), 0)
    token = _token(first)
    value = _value(first)
    if DRAW:
        value = _finite(tl.load(logits + row * row_stride + token, mask=token >= 0, other=float("-inf")))
        if inverse is not None:
            value = tl.minimum(value * tl.load(inverse + row), _LARGEST_FLOAT)
    tl.store(tokens_out + row, token)
    tl.store(token_log_probs_out + row, value - log_z)
