"""Samples against the exact conditional distribution of toy models, and the exact expectation of their weights."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import pytest
import torch
from test_constraint_toy import END, setting, valid_rows

from mmserve.constraint.restored import _Restoring
from mmserve.constraint.search.parser_states import SharedParserStates
from mmserve.constraint.search.witness import admit
from mmserve.constraint.session import sampling
from mmserve.constraint.session.answer import ConstrainedAnswer
from mmserve.constraint.session.sampling import PrefixNode, SampledRun, SampleState, Visit, draw, learn
from mmserve.constraint.session.session import Session
from mmserve.core.canvas import Canvas
from mmserve.core.constraint_state import LanguageState, RunState, WitnessState
from mmserve.core.request import Sampling
from mmserve.core.samples import sample_seed
from mmserve.decode.commit.low_confidence import LowConfidence
from mmserve.decode.sampler import candidates

Row = tuple[int, ...]
COMMIT = LowConfidence()


@dataclass(frozen=True)
class Toy:
    """A next-token model of six tokens, the last of them the end of text, whose every probability is known."""

    name: str  # of its grammar
    size: int
    seed: int = 0
    spread: float = 2.0

    @cache  # noqa: B019 - of a few toys
    def logits(self, before: Row) -> torch.Tensor:
        rng = np.random.default_rng([self.seed, len(before), *before])
        return torch.from_numpy(rng.normal(size=6).astype(np.float32) * self.spread)

    def probability(self, row: Row) -> float:
        """Of a canvas: an answer, its end, and nothing that the model has a part in after it."""
        end = row.index(END) + 1 if END in row else len(row)
        return math.prod(float(self.logits(row[:i]).double().softmax(-1)[row[i]]) for i in range(end))

    @cached_property
    def joint(self) -> dict[Row, float]:
        """The probability of each valid canvas."""
        return {tuple(row): self.probability(tuple(row)) for row in valid_rows(self.name, self.size).tolist()}

    @cached_property
    def mass(self) -> float:
        return sum(self.joint.values())

    def masked(self) -> dict[Row, float]:
        """What masking each token draws from."""
        found: dict[Row, float] = {}
        for row in self.joint:
            found[row], end = 1.0, row.index(END) + 1 if END in row else len(row)
            for i in range(end):
                p = self.logits(row[:i]).double().softmax(-1).tolist()
                open_ways = {other[i] for other in self.joint if other[:i] == row[:i]}
                found[row] *= p[row[i]] / sum(p[token] for token in open_ways)
        return found

    def sample(self, seed: int, sampled: SampleState | None) -> Row:
        """A sample through the sampler and the constraint's own step."""
        grammar, lexicon = setting(self.name)
        answer = ConstrainedAnswer(admit(grammar, lexicon, self.size), lexicon, sampled=sampled)
        session = Session(answer, causal=True)
        canvas = Canvas.create(np.zeros(1), new_tokens=self.size, block_length=1, mask_id=6)
        tempered = Sampling(temperature=1.0, seed=seed)
        while not canvas.answer({END})[1]:
            targets, before = canvas.block_masked(), tuple(canvas.tokens[1 : canvas.known()].tolist())
            observer = session.observe(canvas, targets)
            proposed = candidates(self.logits(before)[None].clone(), targets, canvas, tempered, (), observer)
            canvas.count_forward()
            final = session.choose(canvas, proposed, COMMIT)
            canvas.commit(final.positions, final.tokens)
            session.sync(canvas)
        row = canvas.answer({END})[0].tolist()
        return tuple(row + [END] * (self.size - len(row)))

    def distance(self, drawn: Sequence[tuple[Row, float]]) -> float:
        """Total variation between weighted samples and the model's distribution over valid canvases."""
        held: dict[Row, float] = defaultdict(float)
        for row, weight in drawn:
            held[row] += weight / sum(w for _row, w in drawn)
        return self.variation(held)

    def variation(self, held: dict[Row, float]) -> float:
        assert set(held) <= set(self.joint)
        return sum(abs(held.get(row, 0.0) - p / self.mass) for row, p in self.joint.items()) / 2


#: Masking each token is far from these models' distributions: 0.68, 0.61 and 0.61 in total variation.
TOYS = (Toy("either", 5, seed=1), Toy("balanced", 4, seed=1), Toy("string", 5, seed=3))


@cache
def weighted(toy: Toy, count: int) -> list[tuple[Row, float]]:
    """Samples by AWRS, with their weights."""
    drawn = []
    for seed in range(count):
        sampled = SampleState()
        row = toy.sample(seed, sampled)
        drawn.append((row, math.exp(sampled.log_weight)))
    return drawn


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)
def test_weighted_samples_approach_the_model_where_masked_ones_stay_away(toy: Toy) -> None:
    assert toy.variation(toy.masked()) > 0.6
    assert toy.distance([(toy.sample(seed, None), 1.0) for seed in range(40)]) > 0.2
    drawn = weighted(toy, 200)
    few = np.mean([toy.distance(drawn[i : i + 10]) for i in range(0, 100, 10)])
    assert toy.distance(drawn) < 0.15
    assert toy.distance(drawn) < few / 2, "more samples come nearer"


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)
def test_the_mean_weight_is_the_probability_of_a_valid_answer(toy: Toy) -> None:
    weights = np.array([weight for _row, weight in weighted(toy, 200)])
    assert abs(weights.mean() - toy.mass) < 4 * weights.std() / math.sqrt(len(weights))
    assert weights.std() / math.sqrt(len(weights)) < 0.2 * toy.mass, "the bound says something"


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)
def test_each_sample_learns_from_those_before_it(toy: Toy) -> None:
    """Without weights: the samples of one request approach the model's distribution by themselves."""
    root, drawn, futures = PrefixNode(), list[tuple[Row, float]](), list[float]()
    for i in range(160):
        drawn.append((toy.sample(sample_seed(7, i), SampleState(root)), 1.0))
        futures.append(root.future)
    assert toy.distance(drawn[40:]) < toy.variation(toy.masked()) / 3
    assert futures == sorted(futures, reverse=True)
    assert futures[0] > 2 * toy.mass
    assert toy.mass <= futures[-1] < 1.1 * toy.mass, "what is expected is never less than what is so, and comes to it"


def test_learning_samples_have_unbiased_weights_too() -> None:
    toy, weights = TOYS[2], []
    for request in range(30):
        root = PrefixNode()
        for i in range(5):
            sampled = SampleState(root)
            toy.sample(sample_seed(request, i), sampled)
            weights.append(math.exp(sampled.log_weight))
    by_request = np.array(weights).reshape(-1, 5).mean(1)
    assert abs(by_request.mean() - toy.mass) < 4 * by_request.std() / math.sqrt(len(by_request))
    late, plain = np.array(weights).reshape(-1, 5)[:, 2:], np.array([w for _row, w in weighted(toy, 200)])
    assert late.std() < 0.75 * plain.std(), "what was learned leaves less to correct"


def expected(mass: np.ndarray, good: frozenset[int]) -> np.ndarray:
    """``E[W 1(i)]`` of each entry, over all orders of the draws."""
    found = np.zeros(len(mass))
    for order in itertools.permutations(range(len(mass))):
        probability, left = 1.0, mass.sum()
        for entry in order:
            probability, left = probability * mass[entry] / left, left - mass[entry]
        noised = np.zeros(len(mass))
        noised[list(order)] = np.arange(len(mass), 0, -1)
        result = draw(mass, noised, lambda i: "fine" if i in good else None)
        if result.chosen is not None:
            assert result.accepted == "fine" and result.chosen in good
            found[result.chosen] += probability * result.mass
        assert not good & set(result.rejected)
    return found


@pytest.mark.parametrize(("most", "further"), [(9, 1), (9, 2), (9, 9), (1, 1), (2, 1), (2, 2), (3, 1)])
def test_a_draw_weighs_each_entry_as_its_mass_says(most: int, further: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every set of accepted entries, also where the draws come to their bound."""
    monkeypatch.setattr(sampling, "MOST", most)
    monkeypatch.setattr(sampling, "FURTHER", further)
    mass = np.array([0.5, 0.2, 0.15, 0.05, 0.02])
    for size in range(6):
        for good in map(frozenset, itertools.combinations(range(5), size)):
            exact = np.where([i in good for i in range(5)], mass, 0.0)
            np.testing.assert_allclose(expected(mass, good), exact, atol=1e-12)


def test_draws_are_bounded_and_impossible_entries_are_never_drawn() -> None:
    asked = list[int]()
    rng = np.random.default_rng(0)
    mass = rng.random(1000)
    mass[::2] = 0.0
    with np.errstate(divide="ignore"):
        noised = np.log(mass) + rng.gumbel(size=1000)
    result = draw(mass, noised, lambda i: asked.append(i))
    assert result.chosen is None and result.mass == 0.0
    assert asked == list(result.rejected)
    assert len(asked) == sampling.MOST and all(i % 2 for i in asked)
    assert (np.diff(noised[asked]) < 0).all()


def test_a_model_that_can_say_no_valid_answer_leaves_the_witness_at_a_weight_of_zero() -> None:
    class Mute(Toy):
        def logits(self, before: Row) -> torch.Tensor:
            row = super().logits(before).clone()
            row[:4] = -math.inf
            return row

    toy = Mute("string", 5)  # nothing but a" and the end of text
    for root in (None, PrefixNode()):
        sampled = SampleState(root)
        assert toy.sample(0, sampled) in toy.joint
        assert sampled.log_weight == -math.inf
    assert root is not None and root.future == 0.0


def test_what_is_learned_is_the_expected_future() -> None:
    """A tree of two tokens, by hand."""
    root = PrefixNode()
    learn(root, [Visit(1, 0.3, 0.9, ((2, 0.1),)), Visit(4, 0.5, 0.6, ())])
    assert root.next[1][1].future == pytest.approx(0.6)
    assert root.future == pytest.approx(0.9 - 0.1 - 0.3 * 0.4)
    assert root.futures(np.array([0, 1, 2])).tolist() == pytest.approx([1.0, 0.6, 0.0])
    learn(root, [Visit(1, 0.3, 0.9, ()), Visit(None, 0.0, 0.6, ((5, 0.1),))])
    assert root.next[1][1].future == pytest.approx(0.5)
    assert root.future == pytest.approx(0.9 - 0.1 - 0.3 * 0.5)


def test_what_a_sample_has_met_is_kept_only_where_others_learn_from_it() -> None:
    """It would grow with the answer, and travel with each move of it."""
    toy = TOYS[0]
    alone, learning = SampleState(), SampleState(PrefixNode())
    toy.sample(0, alone)
    toy.sample(0, learning)
    assert not alone.visits
    assert learning.visits


def test_a_run_in_which_the_parser_failed_goes_on_elsewhere() -> None:
    """The first token was drawn, and the parser failed at the next: neither it nor the witness's is led anywhere."""
    grammar, lexicon = setting("balanced")
    restoring = _Restoring(grammar.vocabulary, lexicon, SharedParserStates(lexicon), "")
    language, tokens = LanguageState((grammar.source,)), np.array([0, 1, 0, 1, END])
    before = restoring.witness(WitnessState(language, tokens, 4, 1), broken=True)
    drawn = RunState(np.array([0, 1]), np.zeros(2, np.float32), WitnessState(language, tokens, 4, 2), -math.inf)
    run = restoring.ranked(drawn, before, broken=True)
    assert isinstance(run, SampledRun)
    assert run.witness.known == 2 and run.tokens.tolist() == [0, 1]


def test_the_only_valid_answer_is_never_lost_however_improbable_it_is() -> None:
    """Where its future were 0, no later sample could be drawn at all."""
    root = PrefixNode()
    rejected = ((0, 0.75), (1, 0.25))  # with the answer's own probability they are 1 all the same
    learn(root, [Visit(2, 1e-20, 1.0, rejected), Visit(3, 1e-5, 1.0, ((4, 1.0),))])
    assert root.future == pytest.approx(1e-25)
    assert root.futures(np.arange(3)).tolist() == pytest.approx([0.0, 0.0, 1e-5])
