"""The description of HTTP bodies: its names are those that readers take, and what it shows is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
from bodies import body_with

from mmserve.http import checks, tokens
from mmserve.http.app import APIS, COUNTS, DETOKENIZE, TOKENIZE
from mmserve.http.decisions import DECISION_APIS
from mmserve.http.described import BODIES
from mmserve.http.fields import Fields
from mmserve.http.messages import read_counted
from mmserve.http.openapi import document

READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{path: api.read for path, api in APIS.items()},
    **{path: api.read for path, api in DECISION_APIS.items()},
    "/v1/constraints": checks.read,
    COUNTS: read_counted,
    TOKENIZE: tokens.read,
    DETOKENIZE: tokens.read_ids,
}


def test_every_route_is_described() -> None:
    assert set(BODIES) == set(READERS)


@pytest.mark.parametrize("path", BODIES)
def test_the_names_are_those_that_are_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = set[str]()
    for method in ("take", "any", "nested"):
        real = getattr(Fields, method)

        def noted(self: Fields, name: str, *args: Any, _real: Any = real, **how: Any) -> Any:
            if not self._path:
                taken.add(name)
            return _real(self, name, *args, **how)

        monkeypatch.setattr(Fields, method, noted)
    for name in BODIES[path]:
        READERS[path](body_with(path, name))
    assert taken == set(BODIES[path])


@pytest.mark.parametrize("path", BODIES)
def test_examples_are_as_described(path: str) -> None:
    description = document(["bundled"])
    schema = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema_rs.validator_for(schema)
    for name in BODIES[path]:
        validator.validate(body_with(path, name))


@pytest.mark.parametrize("path", APIS)
def test_null_is_absence(path: str) -> None:
    fields = BODIES[path]
    least = {name: field.example for name, field in fields.items() if field.required}
    absent = READERS[path](least)
    for name in fields.keys() - least.keys():
        assert READERS[path]({**least, name: None}).message == absent.message, name
