"""Constraints over canvases of random tokens: every answer obeys within its budget, whatever the network says."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gemma_checkpoints import LENGTH, STEPS, entropy, gemma, load_gemma, save_gemma
from harness import Bench
from helpers import tokenizer
from test_constrained import SCHEMAS, check, constrained

from mmserve.config import SchedulerConfig
from mmserve.constraint.session.session import Projected
from mmserve.core.constraint import Choice, ConstraintSpec, Hole, Regex, Template
from mmserve.core.request import Policy, Request
from mmserve.decode.schedulers import load_schedulers
from mmserve.decode.uniform_state import constraint
from mmserve.decode.uniform_state.samplers import Step
from mmserve.errors import InvalidArgument
from mmserve.models.base import CanvasModel, OpenCanvas

Make = Callable[..., Bench]
SCHEDULERS = load_schedulers(
    [
        SchedulerConfig(name="bound", kind="EntropyBoundScheduler", numbers={"num_inference_steps": 4}),
        SchedulerConfig(name="ddim", kind="DiscreteDDIMScheduler", numbers={"num_inference_steps": 4}),
    ]
)
COMMITS = (
    entropy(),
    entropy(bound=1e9),
    Policy(name="scheduler", options={"name": "bound"}),
    Policy(name="scheduler", options={"name": "ddim"}),
)


@pytest.fixture(scope="module")
def babbling(tmp_path_factory: pytest.TempPathFactory) -> CanvasModel:
    return load_gemma(save_gemma(tmp_path_factory.mktemp("gemma"), 12))


class Network:
    """Keeps of what is final the tokens; what it says of a canvas is up to its kind."""

    vocab_size = len(tokenizer())

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return iter(())

    def products(self) -> dict[tuple[int, int], Any]:
        return {}

    def set_row_floor(self, rows: int) -> None:
        pass

    def read(self, ids_n: torch.Tensor, past: Any | None, features: torch.Tensor | None = None) -> Any:
        return ids_n if past is None else torch.cat([past, ids_n])

    def say(self, canvas_L: torch.Tensor, past: Any) -> torch.Tensor:
        raise NotImplementedError

    def predict(self, canvases: list[OpenCanvas]) -> list[torch.Tensor]:
        return [self.say(canvas.tokens_L, canvas.past) for canvas in canvases]


@dataclasses.dataclass
class Adversary(Network):
    """Other logits for every canvas; ``spread`` how sure it is, ``ends`` how much it wants to end, ``junk`` to say
    what no text has."""

    spread: float
    ends: float
    junk: float

    def say(self, canvas_L: torch.Tensor, past: Any) -> torch.Tensor:
        seed = hash((len(past), *canvas_L.tolist())) % (1 << 40)
        logits = torch.randn(len(canvas_L), self.vocab_size, generator=torch.Generator().manual_seed(seed))
        logits *= self.spread
        logits[:, -2:] += self.ends * self.spread
        logits[:, :8] += self.junk * self.spread
        return logits


@dataclasses.dataclass
class Sayer(Network):
    """Says one answer, whatever stands on the canvas, and nearly always so."""

    answer: list[int]
    prompt: int

    def say(self, canvas_L: torch.Tensor, past: Any) -> torch.Tensor:
        start = len(past) - self.prompt
        said = [*self.answer, *[self.vocab_size - 1] * (start + len(canvas_L))][start : start + len(canvas_L)]
        logits = torch.zeros(len(canvas_L), self.vocab_size)
        logits[torch.arange(len(canvas_L)), torch.tensor(said)] = 20.0
        return logits


def with_network(model: CanvasModel, network: Network) -> CanvasModel:
    return dataclasses.replace(model, network=network)


def least(bench: Bench) -> list[int]:
    """The least budget of each schema, as the refusal of a smaller one says it."""
    found = []
    for schema in SCHEMAS:
        error = bench.submit(constrained(gemma("small", "a", max_new_tokens=1), schema))[0].error()
        assert isinstance(error, InvalidArgument), error
        found.append(int(error.message.partition("at least ")[2].split()[0]))
    return found


def asked(budgets: list[int]) -> list[tuple[Request, dict[str, Any]]]:
    """Every schema with every way to commit: budgets from the least on, within one canvas and over several."""
    made = []
    for i in range(len(SCHEMAS) * len(COMMITS)):
        n, commit = i % len(SCHEMAS), COMMITS[i // len(SCHEMAS) % len(COMMITS)]
        request = gemma(
            f"r{i}",
            "red " * (i % 3),
            max_new_tokens=budgets[n] + (0, 1, 3, 9, 30)[(i + i // 7) % 5],
            commit=commit,
            temperature=0.9 if commit == COMMITS[3] and i % 2 else 0.0,
            seed=i,
        )
        made.append((constrained(request, SCHEMAS[n]), SCHEMAS[n]))
    return made


def everything_obeys(bench: Bench, pairs: list[tuple[Request, dict[str, Any]]], alone: int) -> None:
    calls = bench.submit(*(request for request, _schema in pairs))
    for call, (_request, schema) in zip(calls, pairs, strict=True):
        check(call, schema)
    for call in calls[::alone]:
        again, done = bench.ask(dataclasses.replace(call.request, id="alone")), call.finished()
        assert (again.text, again.forwards, again.closed_by_budget) == (done.text, done.forwards, done.closed_by_budget)
    bench.await_nothing_left()


@pytest.fixture
def projections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many positions were accepted: there a canvas holds the witness, and in the end everywhere."""
    seen, real = list[int](), constraint.projected

    def looked(step: Step, found: Projected) -> Step:
        made, inside = real(step, found), len(found.tokens)
        witness = torch.from_numpy(found.tokens)
        accepted = made.accepted_L[:inside]
        assert torch.equal(made.noise_L[:inside][accepted], witness[accepted])
        assert torch.equal(made.noise_L[~made.accepted_L], step.noise_L[~step.accepted_L])
        assert torch.equal(made.predicted_L[:inside], witness) and torch.equal(made.last_L[:inside], witness)
        seen.append(int(accepted.sum()))
        return made

    monkeypatch.setattr(constraint, "projected", looked)
    return seen


def test_a_model_that_babbles_obeys(bench: Make, babbling: CanvasModel, projections: list[int]) -> None:
    b: Bench = bench(babbling, watch=False, schedulers=SCHEDULERS)
    everything_obeys(b, asked(least(b)), 7)
    assert 0 in projections and LENGTH in projections


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("spread", "ends", "junk"), [(0.01, 0.0, 0.0), (30.0, 0.0, 0.0), (3.0, 4.0, 4.0)])
def test_whatever_a_network_says_the_answer_obeys(
    bench: Make, babbling: CanvasModel, spread: float, ends: float, junk: float, every: int
) -> None:
    b: Bench = bench(
        with_network(babbling, Adversary(spread, ends, junk)), watch=False, schedulers=SCHEDULERS, max_tokens=512
    )
    some = [each for i, each in enumerate(asked(least(b))) if (i + i // len(SCHEMAS)) % every == 0]
    everything_obeys(b, some, 11)


def test_a_model_that_obeys_by_itself_is_not_bent(bench: Make, babbling: CanvasModel) -> None:
    """Also where its answer goes on from canvas to canvas."""
    text = json.dumps({"shape": "circle", "row": 1234567}, separators=(",", ":"))
    answer = tokenizer().encode(text, add_special_tokens=False)
    prompt = len(
        tokenizer().apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)["input_ids"]
    )
    assert len(answer) > LENGTH
    b: Bench = bench(with_network(babbling, Sayer(answer, prompt)), watch=False, schedulers=SCHEDULERS)
    for commit in COMMITS:
        free = gemma("f", "a", max_new_tokens=4 * LENGTH, commit=commit)
        bound = constrained(dataclasses.replace(free, id="b"), SCHEMAS[1])
        mine, theirs = b.ask(bound), b.ask(free)
        assert mine.text == theirs.text == text
        assert mine.forwards <= theirs.forwards
        assert not mine.closed_by_budget


FORMS: list[tuple[tuple[str | Hole, ...], list[str]]] = [
    (("shape: ", Hole(6, Regex("[a-z]{1,6}")), "; row ", Hole(4, Regex("[0-9]{2}"))), ["[a-z]{1,6}", "[0-9]{2}"]),
    (
        (Hole(8, Choice(("red", "a small circle"))), ", and no more than that can be said of the scene, at all."),
        ["red|a .*"],
    ),
    (("a", Hole(3 * LENGTH, Regex("b{3,40}")), "c"), ["b{3,40}"]),
]


def test_a_template_stands_from_the_start_and_its_holes_are_filled(bench: Make, babbling: CanvasModel) -> None:
    """Over several canvases; one on which nothing is open takes no pass."""
    network = Adversary(3.0, 4.0, 4.0)
    b: Bench = bench(with_network(babbling, network), watch=False, schedulers=SCHEDULERS, max_tokens=512)
    for i, (commit, (parts, patterns)) in enumerate(itertools.product(COMMITS, FORMS)):
        request = gemma(f"t{i}", "a", max_new_tokens=90, commit=commit, seed=i, snapshots=True)
        [call] = b.submit(dataclasses.replace(request, constraint=ConstraintSpec(Template(parts))))
        done, texts = call.finished(), [part for part in parts if isinstance(part, str)]
        filled = iter(done.holes)
        assert done.text == "".join(part if isinstance(part, str) else next(filled) for part in parts)
        assert all(re.fullmatch(*pair) for pair in zip(patterns, done.holes, strict=True))
        assert done.reason == "end"
        if texts[0] == parts[0]:
            assert call.snapshots[0].text.startswith(texts[0][: LENGTH // 2])
        else:
            open_canvases = -(-FORMS[1][0][0].max_tokens // LENGTH)
            assert done.forwards <= open_canvases * STEPS, "texts and padding alone take no pass"
    b.await_nothing_left()


def test_samples_stop_strings_and_log_probabilities(bench: Make, babbling: CanvasModel) -> None:
    b: Bench = bench(babbling, watch=False)
    request = constrained(gemma("n", "a", max_new_tokens=30, snapshots=True, stop=('"row"',)), SCHEMAS[1])
    stopped = b.ask(dataclasses.replace(request, streaming=dataclasses.replace(request.streaming, tokens=True)))
    assert stopped.reason == "stop" and stopped.text.startswith('{"shape":')
    assert all(t.log_probability <= 0 for t in stopped.tokens) and stopped.tokens
    words = {
        b.ask(constrained(gemma(f"w{seed}", "a", max_new_tokens=2 * LENGTH, seed=seed), Regex("[a-z ]{3,60}"))).text
        for seed in range(4)
    }
    assert len(words) > 1 and max(map(len, words)) > 3
