"""Constraints that make much work: they end in time, and those of others do not wait for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mmserve.assembly import BackgroundServer
from mmserve.bench.hostile_constraints import Hostile, hostile_constraints
from mmserve.cli.options import any_port
from mmserve.client import Client
from mmserve.config import Config
from mmserve.errors import InvalidArgument

PATIENCE = 60.0


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with BackgroundServer(any_port(Config())) as server, Client(server.address, timeout=PATIENCE) as made:
        made.wait_ready()
        yield made


def named(name: str, salt: int) -> Hostile:
    return next(each for each in hostile_constraints(salt) if each.name == name)


def test_what_no_budget_holds_is_refused_before_it_is_searched(client: Client) -> None:
    for name in ("long_repeat", "nested_repeats", "long_string", "long_array", "long_gbnf", "long_lark"):
        with pytest.raises(InvalidArgument, match=r"must be at least \d+ for any answer"):
            client.generate("Hello", **named(name, 0).options)


def test_a_small_constraint_is_answered_while_large_ones_are_looked_at(client: Client) -> None:
    ended: list[str] = []

    def ask(salt: int) -> None:
        try:
            options = [f"{salt} {n:04} and as many letters as that" for n in range(7000)]
            client.generate("Hello", choices=options, max_new_tokens=2)
        except InvalidArgument:
            ended.append("large")

    threads = [threading.Thread(target=ask, args=(salt,)) for salt in range(4)]
    for thread in threads:
        thread.start()
    try:
        assert client.generate("Hello", regex="[ab]{3}", max_new_tokens=8).text
        assert len(ended) < len(threads) - 2, "it waited for nearly all of the others"
    finally:
        for thread in threads:
            thread.join(PATIENCE)
    assert len(ended) == len(threads)
