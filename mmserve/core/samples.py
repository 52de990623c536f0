"""Several samples of one request, as a separate request each."""

from __future__ import annotations

from dataclasses import replace

from mmserve.core.request import Request

#: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the increment of its state, and the constants of its mixing
#: function.
_GROWTH, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def samples(request: Request) -> tuple[Request, ...]:
    """A request for each sample of ``request``: identical except for id and seed.

    The first has the id and seed of ``request``, so it gives the same answer as a request for one sample. The ids and
    seeds of the others do not depend on the number of samples.
    """
    sampling = request.sampling
    return tuple(
        replace(
            request,
            id=request.id if i == 0 else f"{request.id}.{i}",
            sampling=replace(sampling, n=1, seed=sample_seed(sampling.seed, i)),
        )
        for i in range(sampling.n)
    )


def sample_seed(seed: int, sample: int) -> int:
    """The seed (64 bits) of ``sample``, from 0, of a request with ``seed``; ``seed`` itself for 0.

    Mixed, so that requests with consecutive seeds have no samples in common: with ``seed + sample``, all but one would
    be the same.
    """
    if sample == 0:
        return seed
    mixed = (seed + sample * _GROWTH) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _WORD
    return mixed ^ (mixed >> 31)
