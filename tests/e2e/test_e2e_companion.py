"""The bundled models beside each other, over gRPC: one judges or drafts, about text, pictures and clips."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from e2e_helpers import EMPTY, PATIENCE, answer, settings, wait_for

from mmserve.assembly import BackgroundServer
from mmserve.client import Client, DraftModel, Guided, Ngram
from mmserve.config import Config, ModelConfig
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.reference.evaluate import item, media_files

TWIN = "bundled-causal"
#: About words alone, a picture, two pictures and a clip.
TASKS = ("arithmetic", "count", "json", "differs", "when")


@pytest.fixture(scope="module")
def server() -> Iterator[BackgroundServer]:
    models = (ModelConfig(companion=TWIN), ModelConfig(path=TWIN, name="twin", companion=TWIN))
    common = settings()
    with BackgroundServer(Config(server=common.server, engine=common.engine, models=models)) as background:
        yield background


@pytest.fixture
def client(server: BackgroundServer) -> Iterator[Client]:
    """A client whose requests must leave nothing behind."""
    with Client(server.address, timeout=6 * PATIENCE) as found:
        yield found
    for engine in server.engines.values():
        wait_for("an empty engine", lambda engine=engine: engine.stats() == EMPTY)


def asked(task: str, index: int = 0) -> tuple[str, dict[str, Any]]:
    """A question and its media."""
    thing, question = item(task, index, 5)
    media = media_files(task, thing)
    return question.text, {"images": media["images"], "videos": media["videos"], "max_new_tokens": 20}


def test_models_say_what_their_companions_give_them(client: Client) -> None:
    policies = {info.name: info.commit_policies for info in client.models()}
    assert "guided" in policies["bundled"] and "draft_model" not in policies["bundled"]
    assert "draft_model" in policies["twin"] and "guided" not in policies["twin"]


@pytest.mark.parametrize("task", TASKS)
def test_guided_answers_as_the_companion_does_alone(client: Client, task: str) -> None:
    text, media = asked(task)
    alone = client.generate(text, model="twin", **media)
    found = client.generate(text, model="bundled", commit=Guided(), **media)
    assert found.text == alone.text
    assert replace(found.usage, kv_positions=0) == replace(alone.usage, kv_positions=0), "one holds a canvas"
    assert found.forwards <= alone.forwards
    lenient = client.generate(text, model="bundled", commit=Guided(top_k=8), **media)
    assert lenient.forwards >= 1 and lenient.usage.visual_tokens == found.usage.visual_tokens


@pytest.mark.parametrize("task", TASKS)
def test_drafts_save_passes_and_change_nothing(client: Client, task: str) -> None:
    text, media = asked(task, 1)
    plain = client.generate(text, model="twin", quality="exact", **media)  # the default pair may draft by itself
    for length in (1, 4):
        found = client.generate(text, model="twin", commit=DraftModel(length), **media)
        assert (found.text, found.usage.completion_tokens) == (plain.text, plain.usage.completion_tokens)
        assert found.forwards <= 1 + -(-(plain.forwards - 1) // (length + 1)), "its companion is the model itself"


def test_many_at_once_are_answered_as_each_alone(client: Client, server: BackgroundServer) -> None:
    policies: tuple[Any, ...] = (Guided(), "guided", Guided(8, 0.3), "threshold", "guided")
    requests = [(asked(task), policies[(i + i // 5) % 5], i) for i, task in enumerate(TASKS * 2)]

    def ask(request: Any) -> Any:
        (text, media), policy, seed = request
        return answer(client.generate(text, commit=policy, seed=seed, temperature=seed % 3 / 2, **media))

    alone = [ask(request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        assert list(pool.map(ask, requests)) == alone


def test_what_is_wrong_is_said(client: Client) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.generate("x", commit=Guided(ratio=1.5), temperature=-1)
    assert [v.field for v in caught.value.violations] == ["sampling.temperature", "diffusion.guided.ratio"]
    with pytest.raises(InvalidArgument, match=r"diffusion\.draft_model\.length: must be in \[1, 64\], not 65"):
        client.generate("x", model="twin", commit=DraftModel(65))
    with pytest.raises(
        InvalidArgument, match=r"sampling\.repetition_penalty: must not be set with the commit policy 'guided'"
    ):
        client.generate("x", commit="guided", repetition_penalty=1.1)
    with pytest.raises(Unimplemented, match="model 'bundled' has no commit policy 'draft_model'"):
        client.generate("x", commit="draft_model")
    with pytest.raises(InvalidArgument):
        client.generate("x", model="twin", commit=DraftModel("long"))  # type: ignore[arg-type]
    assert client.generate("x", model="twin", commit=Ngram(), max_new_tokens=2).forwards


def test_a_model_without_a_companion_says_what_to_configure() -> None:
    with BackgroundServer(settings()) as background, Client(background.address, timeout=PATIENCE) as alone:
        told = r"model 'bundled' has no commit policy 'guided'.*needs a companion: name one in the model's entry"
        with pytest.raises(Unimplemented, match=told):
            alone.generate("x", commit="guided")
