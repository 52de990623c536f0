"""Training a filter: what is recorded of a model's own decoding, and that a known rule is learned from it."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers import ask

from mmserve.config import EngineConfig, resolve
from mmserve.core.request import VideoPart
from mmserve.decode.commit.low_confidence import LowConfidence
from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel
from mmserve.train_filter.fit import fit, score
from mmserve.train_filter.prompts import reference_requests, written_requests
from mmserve.train_filter.record import EVERY, Recorder, StepExample
from mmserve.train_filter.train import train

ENGINE = resolve(EngineConfig(max_tokens=256, max_running=1, torch_threads=1, stages="inline"))


def quiet(_text: str) -> None:
    return


def examples(count: int, seed: int) -> list[StepExample]:
    """Blocks of many lengths, in which a candidate is right where it or its left neighbour is sure (0.7 or more)."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        still_open = rng.random(int(rng.integers(4, 40))) < 0.8
        drawn = rng.choice([0.1, 0.7], len(still_open)) + 0.29 * rng.random(len(still_open))
        confidence = np.where(still_open, drawn, 1).astype(np.float32)
        left = np.concatenate([[1], confidence[:-1]])
        made.append(
            StepExample(confidence, still_open, still_open & (np.maximum(confidence, left) >= 0.69), still_open)
        )
    return made


def test_a_known_rule_is_learned_and_the_same_again_from_the_same_seed() -> None:
    lines: list[str] = []
    made = fit(examples(300, 0), seed=1, steps=1500, progress=lines.append)
    assert made.radius >= 1 and "1500 of 1500" in lines[-1]
    judged = score(made, examples(60, 1), 0.9)
    assert judged.precision is not None and judged.precision > 0.98
    assert judged.recall is not None and judged.recall > 0.9
    assert judged.right is not None and 0.5 < judged.right < 0.9
    again, other = (fit(examples(300, 0), seed=seed, steps=30, progress=quiet) for seed in (1, 2))
    first = fit(examples(300, 0), seed=1, steps=30, progress=quiet)
    assert np.array_equal(first.hidden_weight, again.hidden_weight)
    assert not np.array_equal(first.hidden_weight, other.hidden_weight)


def test_a_score_has_no_share_of_nothing() -> None:
    made = fit(examples(20, 0), seed=0, steps=5, progress=quiet)
    none = StepExample(*(np.ones(3, kind) for kind in (np.float32, bool)), np.zeros(3, bool), np.zeros(3, bool))
    judged = score(made, [none], 2.0)
    assert (judged.candidates, judged.right, judged.precision, judged.recall) == (0, None, None, None)
    with pytest.raises(ConfigError, match="no candidate"):
        fit([none], seed=0, steps=5, progress=quiet)


def test_trajectories_are_those_of_the_models_own_decoder(model: LoadedModel) -> None:
    recorder = Recorder(model, ENGINE)
    request = ask("r", max_new_tokens=12, block=6)
    found = recorder.trajectory(request)
    plain = recorder.decode(request, LowConfidence())
    assert found.baseline == plain and plain.forwards <= 12
    baseline, perfect = (
        found.examples[: -(-plain.forwards // EVERY)],
        found.examples[-(-plain.forwards // EVERY) :],
    )
    assert all(len(s.confidence) == len(s.still_open) == len(s.right) == len(s.judged) == 6 for s in found.examples)
    assert baseline[0].still_open.all() and perfect[0].still_open.all()
    for example in found.examples:
        assert not (example.right & ~example.judged).any() and not (example.judged & ~example.still_open).any()
        assert (example.confidence[~example.still_open] == 1).all() and example.confidence[example.still_open].max() < 1
    assert np.array_equal(baseline[0].right, perfect[0].right)  # both begin with an empty canvas
    assert baseline[0].right[np.argmax(baseline[0].confidence)]  # what the baseline commits first is right
    for before, after in pairwise(perfect):
        begun = after.still_open.all()  # the next block
        assert begun or np.array_equal(after.still_open, before.still_open & ~before.right)
    assert not perfect[-1].right.any() or np.array_equal(perfect[-1].right, perfect[-1].still_open)


def test_a_filter_of_a_model_comes_with_a_record(text_model: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"what is {n} and {n}?\n" for n in range(7)))
    requests = list(written_requests(text_model, path, 8))
    assert [r.sampling.max_new_tokens for r in requests] == [8] * 7
    assert len({r.diffusion.block_length for r in requests}) > 1
    (made, record), (again, same) = (train(text_model, requests, seed=3, steps=20, progress=quiet) for _ in range(2))
    assert np.array_equal(made.hidden_weight, again.hidden_weight) and record == same
    aside = record["held_out"]
    assert (record["prompts"], aside["prompts"], record["seed"]) == (7, 1, 3)
    assert aside["decoding"]["low_confidence"]["same_as_baseline"] == 1
    assert set(aside["decoding"]) == {"low_confidence", "learned", "threshold"}
    assert all(figures["tokens_per_forward"] > 0 for figures in aside["decoding"].values())
    with pytest.raises(ConfigError, match="too few"):
        train(text_model, requests[:5], seed=3, steps=20, progress=quiet)


def test_prompts_of_a_file_that_holds_none(text_model: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    for name in ("empty", "missing"):
        with pytest.raises(ConfigError, match=name):
            next(written_requests(text_model, tmp_path / name, 8))


def test_reference_items_are_what_the_model_can_be_shown(model: LoadedModel, text_model: LoadedModel) -> None:
    first, again = (list(islice(reference_requests(model, 5), 14)) for _ in range(2))
    assert first == again and first != list(islice(reference_requests(model, 6), 14))
    parts = [r.messages[0].parts for r in first[:12]]  # each task that needs no video, once
    assert sum(len(of) == 1 for of in parts) == 1  # arithmetic; all others are about pictures
    assert not any(isinstance(part, VideoPart) for of in parts for part in of)
    assert all(len(r.messages[0].parts) == 1 for r in islice(reference_requests(text_model, 5), 4))
