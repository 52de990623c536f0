"""Sampling true to the model over gRPC, on both bundled models: weights, samples that learn, typed refusals."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from e2e_helpers import EMPTY, PATIENCE, answer, command_here, settings, wait_for

from mmserve.assembly import BackgroundServer
from mmserve.client import Client, Edit, Ngram, Result
from mmserve.config import Config, ModelConfig
from mmserve.errors import InvalidArgument, MMServeError, Unimplemented
from mmserve.reference.scenes import draw_scene

CHOICES = ("red", "green", "blue", "yellow")


@pytest.fixture(scope="module")
def server() -> Iterator[BackgroundServer]:
    common = settings()
    models = (ModelConfig(path="bundled-causal", name="causal"), ModelConfig(name="diffusion"))
    with BackgroundServer(Config(server=common.server, engine=common.engine, models=models)) as background:
        yield background


@pytest.fixture
def client(server: BackgroundServer) -> Iterator[Client]:
    """A client whose requests must leave nothing behind."""
    with Client(server.address, timeout=6 * PATIENCE) as found:
        yield found
    for engine in server.engines.values():
        wait_for("an empty engine", lambda engine=engine: engine.stats() == EMPTY)


def ask(client: Client, sampling: str | None, **options: Any) -> Result:
    picture = draw_scene(random.Random(5)).png()
    given = {"choices": CHOICES, "temperature": 4.0, "max_new_tokens": 8, "model": "causal", **options}
    return client.generate("What color is the circle?", [picture], constraint_sampling=sampling, **given)


def weights(result: Result) -> list[float]:
    assert all(sample.text in CHOICES for sample in result.samples)
    found = [sample.log_weight for sample in result.samples]
    return [math.exp(weight) for weight in found if weight is not None]


@pytest.mark.parametrize("model", [{"model": "causal"}, {"model": "diffusion", "block_length": 1}])
def test_both_ways_tell_how_probable_a_valid_answer_is(client: Client, model: dict[str, Any]) -> None:
    assert ask(client, "mask", **model).log_weight is None
    assert ask(client, None, **model).log_weight is None
    plain, learning = weights(ask(client, "awrs", n=8, **model)), weights(ask(client, "asap", n=8, **model))
    assert len(plain) == len(learning) == 8
    assert all(0 < weight < 0.5 for weight in (*plain, *learning))
    assert sum(plain) == pytest.approx(sum(learning), rel=0.25)
    assert min(weights(ask(client, "awrs", n=4, **{**model, "temperature": 1.0}))) > 0.99, "here the model is sure"


@pytest.mark.parametrize("sampling", ["awrs", "asap"])
def test_samples_are_the_same_alone_and_beside_others(client: Client, sampling: str) -> None:
    several = ask(client, sampling, n=4)
    one = ask(client, sampling)
    fewer = ask(client, sampling, n=3)
    assert (answer(one)[:2], one.log_weight) == (answer(several)[:2], several.log_weight)
    assert [(s.text, s.log_weight) for s in fewer.samples] == [(s.text, s.log_weight) for s in several.samples[:3]]
    assert len(weights(ask(client, sampling, n=2, commit=Ngram()))) == 2


@pytest.mark.parametrize(
    ("options", "error", "place"),
    [
        ({"temperature": 0.0}, InvalidArgument, "sampling.temperature"),
        ({"stop": "a"}, InvalidArgument, "sampling.stop"),
        ({"model": "diffusion"}, Unimplemented, "block_length 1"),
        ({"model": "diffusion", "block_length": 1, "commit": Edit()}, Unimplemented, "'edit'"),
    ],
)
def test_what_has_no_meaning_is_refused(
    client: Client, options: dict[str, Any], error: type[MMServeError], place: str
) -> None:
    with pytest.raises(error, match=place.replace(".", r"\.")):
        ask(client, "awrs", **options)


def test_the_command_line(server: BackgroundServer) -> None:
    options = ("--choice", "yes", "--choice", "no", "--temperature", "1", "--n", "2", "--max-new-tokens", "8", "--json")
    done = command_here("generate", "hi", "--server", server.address, "--constraint-sampling", "awrs", *options)
    assert done.returncode == 0, done.stderr
    samples = json.loads(done.stdout)["samples"]
    assert all(sample["text"] in ("yes", "no") and sample["log_weight"] <= 1e-6 for sample in samples)
