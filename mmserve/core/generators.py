"""Generators with a return value."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

Y = TypeVar("Y")
R = TypeVar("R")


class Returning(Generic[Y, R]):
    """Iterates over a generator; ``returned`` is its return value, set when it has ended."""

    returned: R

    def __init__(self, generator: Generator[Y, None, R]) -> None:
        self._generator = generator

    def __iter__(self) -> Iterator[Y]:
        self.returned = yield from self._generator
