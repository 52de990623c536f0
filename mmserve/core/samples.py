"""Several samples of one request: which request each of them is."""

from __future__ import annotations

from dataclasses import replace

from mmserve.core.request import Request

#: Steele, Lea and Flood's SplitMix64 (OOPSLA 2014): what its state grows by, and how a state is mixed.
_GROWTH, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def samples(request: Request) -> tuple[Request, ...]:
    """A request for each sample that ``request`` asks for: the same, but for its id and its seed.

    The first has the id and the seed of ``request``, so that it is the answer to a request for one. Which id and seed
    the others have does not depend on how many there are.
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
    """The seed (64 bits) of sample number ``sample``, from 0, of a request with ``seed``; ``seed`` itself for 0.

    Mixed, so that the samples of neighbouring seeds have none in common: with ``seed + sample`` all but one would be
    the same.
    """
    if sample == 0:
        return seed
    mixed = (seed + sample * _GROWTH) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _WORD
    return mixed ^ (mixed >> 31)
