"""Every option of a request is defined, typed and documented in one place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from mmserve.client import AsyncClient, Client, Options
from mmserve.client.outgoing import build_request

METHODS = [Client.generate, Client.stream, AsyncClient.generate, AsyncClient.stream]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__qualname__)
def test_help_documents_every_argument_and_option(method: Callable[..., Any]) -> None:
    text = inspect.getdoc(method) or ""
    described = dict(re.findall(r"^(\w+): (.+)$", text, re.MULTILINE))
    named = [name for name, parameter in inspect.signature(method).parameters.items() if parameter.kind != 4]
    assert set(described) >= {*Options.__annotations__, *named} - {"self"}
    for name in Options.__annotations__:
        said = re.search(rf"^{name}: (.+\n(?: {{4}}.+\n)*)", text + "\n", re.MULTILINE)
        assert said and "default" in said[1], f"the documentation of {name} must name its default"


def test_an_option_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"there is no option 'temprature'; did you mean 'temperature'\?"):
        build_request("x", (), deltas=False, snapshots=False, temprature=1.0)  # type: ignore[call-arg]
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match=r"no option 'xyz'$"):
        client.generate("x", xyz=1)  # type: ignore[call-overload]
