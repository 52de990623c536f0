"""Time and memory for reading large schemas and grammars."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest
from grammars import grammar

from mmserve.constraint.compile.document import read_schema
from mmserve.constraint.compile.finite import least_fixpoint
from mmserve.constraint.findings import Refused
from mmserve.core.constraint import Lark


def test_long_names_and_many_values_are_read_in_little_memory() -> None:
    text = json.dumps({"k" * 100_000: [1] * 70_000}, separators=(",", ":"))
    tracemalloc.start()
    try:
        read_schema(text)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def test_a_name_that_comes_twice_is_found_among_many() -> None:
    text = "{" + "".join(f'"k{n}":1,' for n in range(20_000)) + '"k19999":2}'
    began = time.process_time()
    with pytest.raises(Refused, match="'k19999'"):
        read_schema(text)
    assert time.process_time() - began < 2  # counting each name took nine seconds


def test_a_chain_of_definitions_is_followed_in_one_pass() -> None:
    after = {f"d{n}": f"d{n + 1}" for n in range(1000)}
    asked = 0

    def belongs(name: str, found: set[str]) -> bool:
        nonlocal asked
        asked += 1
        return name == "d999" or after[name] in found

    assert least_fixpoint(after, belongs) == after.keys()
    assert asked <= 2 * len(after)


def test_a_chain_of_terminals_is_checked_in_little_time() -> None:
    chain = "".join(f'T{n}: "a" T{n + 1}\n' for n in range(800)) + 'T800: "z"\n'
    began = time.process_time()
    assert grammar(Lark(f"start: row\nrow: T0 row | T800\n{chain}")).shortest == 1
    assert time.process_time() - began < 5  # following each one to its end took 15 s
