"""Sums of products held in CPU registers, for compiled loops: LLVM does not generate this from a loop over an array.

A tile is some rows of an input by ``COLUMNS`` columns of a matrix. Its sums stay in registers over all elements of the
rows, with each product fused with its sum (``llvm.fma``): the result does not depend on the calling code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

#: Columns of a tile: four vectors of AVX-512.
COLUMNS = 64
_LANES = 16
_FLOAT, _BYTE, _INT32, _INT64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, _LANES)
_ALIGNMENT = 4  # bytes, of all loads


def tile(rows: int) -> Callable[[int, int, int, int, int, bool, int], None]:
    """A function for compiled code that adds products to the sums of ``rows`` rows.

    Its arguments are addresses and element counts (all int64): the first row's address, the stride of rows in elements,
    the address of the weights (fp32 ``[count, COLUMNS]``), ``count``, the address of the sums (fp32 ``[rows,
    COLUMNS]``), whether these start at zero, and an address to prefetch from, a line of 64 bytes for each element.
    """

    @intrinsic
    def add(_context: Any, x: Any, stride: Any, weights: Any, count: Any, sums: Any, fresh: Any, soon: Any) -> Any:
        return types.void(x, stride, weights, count, sums, fresh, soon), lambda _c, b, _s, given: _built(b, rows, given)

    return cast("Callable[[int, int, int, int, int, bool, int], None]", add)


def _built(b: Any, rows: int, given: Any) -> Any:
    x, stride, weights, count, sums, fresh, soon = given
    numbers, vectors = _FLOAT.as_pointer(), _VECTOR.as_pointer()
    x, weights, sums, soon = (b.inttoptr(each, numbers) for each in (x, weights, sums, soon))
    fma = cgutils.get_or_insert_function(b.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), "llvm.fma.v16f32")
    fetch_type = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), *[_INT32] * 3])
    fetch = cgutils.get_or_insert_function(b.module, fetch_type, "llvm.prefetch.p0")

    def load(address: Any) -> Any:
        value = b.load(address)
        value.align = _ALIGNMENT
        return value

    def vector_at(base: Any, offset: int) -> Any:
        return b.bitcast(b.gep(base, [_INT64(offset)]), vectors)

    parts = range(0, COLUMNS, _LANES)
    starts = [b.gep(x, [b.mul(stride, _INT64(row))]) for row in range(rows)]
    places = [vector_at(sums, row * COLUMNS + part) for row in range(rows) for part in parts]
    zero = ir.Constant(_VECTOR, [0.0] * _LANES)
    begun = [b.select(fresh, zero, load(place)) for place in places]
    before, loop, after = b.basic_block, b.append_basic_block(), b.append_basic_block()
    b.branch(loop)
    b.position_at_end(loop)
    k = b.phi(_INT64)
    k.add_incoming(_INT64(0), before)
    totals = [b.phi(_VECTOR) for _ in begun]
    for total, value in zip(totals, begun, strict=True):
        total.add_incoming(value, before)
    line = b.gep(weights, [b.mul(k, _INT64(COLUMNS))])
    own = [load(vector_at(line, part)) for part in parts]
    wanted = b.bitcast(b.gep(soon, [b.mul(k, _INT64(_LANES))]), _BYTE.as_pointer())
    b.call(fetch, [wanted, _INT32(0), _INT32(2), _INT32(1)])  # prefetch for reading, into L2, as data
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    everywhere = ir.Constant(ir.VectorType(_INT32, _LANES), [0] * _LANES)
    added = []
    for row, start in enumerate(starts):
        one = b.insert_element(nothing, load(b.gep(start, [k])), _INT32(0))
        spread = b.shuffle_vector(one, nothing, everywhere)
        added += [b.call(fma, [spread, w, totals[row * len(own) + i]]) for i, w in enumerate(own)]
    following = b.add(k, _INT64(1))
    k.add_incoming(following, loop)
    for total, value in zip(totals, added, strict=True):
        total.add_incoming(value, loop)
    b.cbranch(b.icmp_signed("<", following, count), loop, after)
    b.position_at_end(after)
    for place, value in zip(places, added, strict=True):
        b.store(value, place).align = _ALIGNMENT
    return ir.Constant(_BYTE.as_pointer(), None)
