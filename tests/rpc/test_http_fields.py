"""Values that ``docs/api.md`` does not have for a field are refused with a 400 that names it, over a real socket."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import jsonschema_rs
import pytest
from bodies import body_with
from echo_server import PATIENCE
from test_http_connections import Served

from mmserve.http.described import BODIES

#: Values of every JSON type, none of which means anything.
VALUES: tuple[Any, ...] = ({"no_such_name": ["no such value"]}, -1.5, "no such value", True, [3])


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as found:
        yield found


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", [None, ""])
def test_a_body_names_its_model(served: Served, path: str, name: str | None) -> None:
    """A response repeats the name, which may not be empty."""
    with closing(http.client.HTTPConnection("127.0.0.1", served.front.port, timeout=PATIENCE)) as connection:
        body = json.dumps({**body_with(path, "model"), "model": name})
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert (response.status, b"model: is required" in response.read()) == (400, True)


@pytest.mark.parametrize("path", BODIES)
def test_values_that_are_not_described_are_refused_by_name(served: Served, path: str) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", served.front.port, timeout=PATIENCE)) as connection:
        for name, field in BODIES[path].items():
            validator = jsonschema_rs.validator_for(field.schema)
            for value in (value for value in VALUES if not validator.is_valid(value)):
                named = {} if name == "model" else {"model": "echo"}
                body = json.dumps({**body_with(path, name), name: value, **named})
                connection.request("POST", path, body, {"content-type": "application/json"})
                response = connection.getresponse()
                answer = response.read().decode()
                if name == "model" and isinstance(value, str):
                    assert response.status == 404, answer
                    continue
                assert response.status == 400, (name, value, answer)
                assert re.search(rf"\b{re.escape(name)}\b", answer), (name, value, answer)
