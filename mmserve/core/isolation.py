"""Isolation of a failing request from the rest of its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def run_isolated(run: Callable[[list[A]], Sequence[B]], batch: list[A]) -> list[B | BaseException]:
    """Results of ``run(batch)``; if that raises, of ``run([item])`` for each item, or the exception that it raises.

    A call of ``run`` that raises must have no side effects.
    """
    try:
        return list(run(batch))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - native panics too; the engine reports it
        if len(batch) == 1:
            return [error]
    return [outcome for item in batch for outcome in run_isolated(run, [item])]
