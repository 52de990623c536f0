"""Arithmetic in several steps, the working written out and the final answer on a line of its own."""

from __future__ import annotations

import random

from mmserve.reference.items import Subject

MAX_VALUE = 99
MAX_OPERAND = 30


def problem(_nothing: None, rng: random.Random) -> tuple[str, str]:
    """Two to four operations on a running value between 0 and 99."""
    value = rng.randint(1, 30)
    text, working = [f"Start with {value}."], []
    for _ in range(rng.randint(2, 4)):
        phrase, operation, operand, result = rng.choice(_possible(value, rng))
        text.append(phrase)
        working.append(f"{value}{operation}{operand}={result}")
        value = result
    text.append("What is the result?")
    return " ".join(text), "\n".join((*working, f"Answer: {value}"))


def _possible(value: int, rng: random.Random) -> list[tuple[str, str, int, int]]:
    """(words, sign, operand, result) of each operation that keeps the value in range."""
    steps: list[tuple[str, str, int, int]] = []
    if value < MAX_VALUE:
        n = rng.randint(1, min(MAX_OPERAND, MAX_VALUE - value))
        steps += [(f"Add {n}.", "+", n, value + n)] * 2
    if value > 0:
        n = rng.randint(1, min(MAX_OPERAND, value))
        steps += [(f"Take away {n}.", "-", n, value - n)] * 2
    steps += [
        (phrase, "*", n, value * n) for phrase, n in (("Double it.", 2), ("Triple it.", 3)) if value * n <= MAX_VALUE
    ]
    return steps


def final_answer(text: str) -> str | None:
    """The text of the last ``Answer:`` line, None without one."""
    lines = [line for line in text.splitlines() if line.startswith("Answer:")]
    return lines[-1].removeprefix("Answer:").strip() if lines else None


TEXT = Subject(lambda _rng: None, lambda _nothing: (), {"arithmetic": problem})
