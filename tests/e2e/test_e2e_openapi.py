"""The OpenAPI description over a real socket: every field by kind of model, and requests drawn by Schemathesis.

Of these ``docs/api.md`` has the command of a longer run.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import schemathesis
from bodies import body_with
from e2e_helpers import PATIENCE, Running, running, settings
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as drawn
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from test_e2e_http import ask, free_port

from mmserve.config import ModelConfig
from mmserve.http.described import BODIES

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
#: Kinds of models that the package brings; tools and typed questions are known to both.
MODELS = ("bundled", "bundled-causal")


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    config = settings(server={"http_port": free_port()}, engine={"max_tokens": 256})
    models = (ModelConfig(path="bundled"), ModelConfig(path="bundled-causal"))
    with running(replace(config, models=models)) as found:
        yield found
        found.assert_serves()


@pytest.fixture(scope="module")
def port(served: Running) -> int:
    return served.background.config.server.http_port


def short(path: str, name: str) -> dict[str, Any]:
    """A body with the field, whose answer is short."""
    room = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_completion_tokens"}.get(
        path, "max_tokens"
    )
    if name == "max_tokens" or room not in BODIES[path]:
        return body_with(path, name)
    long = name in ("suffix", "response_format", "tools", "structured_outputs", "guided_json")
    return {room: 24 if long else 4, **body_with(path, name)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("path", BODIES)
def test_every_field_is_honoured_by_every_kind_of_model(port: int, path: str, model: str) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        for name in BODIES[path]:
            body = json.dumps({**short(path, name), "model": model})
            connection.request("POST", path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            answer = response.read().decode()
            if name == "prompt_logprobs" and BODIES[path][name].example is not None and model == "bundled":
                assert response.status == 400 and "prompt_logprobs: log-probabilities" in answer, answer
                continue
            assert response.status == 200, (name, answer)
            assert name != "stream" or answer.startswith(("data: {", "event: ")), answer


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_is_not_described_is_refused(port: int, path: str) -> None:
    name = next(iter(field for field in BODIES[path] if BODIES[path][field].required))
    status, answer, _headers = ask(port, {**short(path, name), "no_such_field": 1}, path)
    allowed = path == "/v1/systemone"  # whose published schema allows others
    assert (status == 200) is allowed and (allowed or "no_such_field" in answer["error"]["message"]), answer


@pytest.fixture(scope="module")
def description(port: int) -> Any:
    return schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json")


@pytest.mark.parametrize("path", [*BODIES, "/v1/models/{name}"])
def test_drawn_requests_are_answered_as_described(description: Any, path: str) -> None:
    operation = description[path]["GET" if "{" in path else "POST"]

    @drawn(
        max_examples=5,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=PATIENCE)

    run()
