"""The engines of a server, read while others replace them."""

from __future__ import annotations

from typing import Any, cast

from mmserve.rpc.engines import EngineLike, Engines


def engine(name: str) -> EngineLike:
    return cast(EngineLike, f"the engine of {name}")


def test_items_are_of_one_moment() -> None:
    """A scrape of the metrics goes on, on its thread, while a reload takes a model away."""
    engines = Engines(("a", "b"))
    engines.add("a", engine("a"))
    engines.add("b", engine("b"))
    seen: dict[str, Any] = {}
    for name, each in engines.items():
        engines.replace(("a",), {})
        seen[name] = each
    assert seen == {"a": engine("a"), "b": engine("b")}
    assert dict(engines) == {"a": engine("a")} and list(engines.values()) == [engine("a")]


def test_the_order_is_that_of_the_names_and_loading_models_are_left_out() -> None:
    engines = Engines(("a", "b", "c"))
    for name in ("c", "a"):
        engines.add(name, engine(name))
    assert list(engines.items()) == [("a", engine("a")), ("c", engine("c"))]
    assert list(engines.values()) == [engine("a"), engine("c")]
