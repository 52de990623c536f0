"""Which model can be another one's companion, and how a configuration or the command line names it."""

from __future__ import annotations

import argparse
import copy
import dataclasses
from pathlib import Path

import pytest
from helpers import tiny_model, tokenizer
from llama_checkpoints import Sighted

from mmserve.cli.options import add_config, read_config
from mmserve.config import ModelConfig, from_mapping
from mmserve.errors import ConfigError
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.companion import accompany
from mmserve.models.registry import load_model
from mmserve.reference.tokenizer import train_tokenizer


def causal(vision: bool = True) -> LoadedModel:
    made = tiny_model(vision=vision, seed=1)
    spec = dataclasses.replace(made.spec, name="beside", attention=Attention.CAUSAL, logit_shift=1)
    return dataclasses.replace(made, spec=spec)


def test_a_causal_model_with_the_same_tokens_can_be_one(model: LoadedModel) -> None:
    beside = causal()
    assert accompany(model, beside).companion is beside
    assert accompany(model, causal(vision=False)).companion is not None
    assert accompany(beside, beside).companion is beside
    assert model.companion is None


def test_a_diffusion_model_cannot(model: LoadedModel) -> None:
    told = "'tiny' cannot be the companion of 'tiny': it is no autoregressive model, its attention is full"
    with pytest.raises(ConfigError, match=told):
        accompany(model, model)


def test_a_model_with_other_tokens_cannot(model: LoadedModel) -> None:
    other = dataclasses.replace(causal(), tokenizer=train_tokenizer(lines=400))
    with pytest.raises(ConfigError, match="'beside' cannot be the companion of 'tiny': their tokenizers differ, as in"):
        accompany(model, other)


def test_special_tokens_of_one_alone_do_no_harm_unless_an_id_has_two(model: LoadedModel) -> None:
    mine, its = (copy.deepcopy(tokenizer()) for _ in range(2))
    mine.add_tokens(["<mask of mine>"], special_tokens=True)
    first, second = dataclasses.replace(model, tokenizer=mine), dataclasses.replace(causal(), tokenizer=its)
    assert accompany(first, second).companion is second
    its.add_tokens(["<another>"], special_tokens=True)
    with pytest.raises(ConfigError, match="differ, as in the token '<mask of mine>'"):
        accompany(first, second)


def test_a_model_that_sees_otherwise_cannot(model: LoadedModel) -> None:
    other = causal()
    assert other.vision is not None
    other.vision.tokens_per_image += 1
    with pytest.raises(ConfigError, match="its tokens_per_image are 5, not 4"):
        accompany(model, other)


def test_a_configuration_names_it(tmp_path: Path) -> None:
    folder = Sighted(tmp_path / "one", image_aspect_ratio="square").folder
    loaded = load_model(ModelConfig(path=str(folder), companion=str(folder), name="served"))
    assert loaded.spec.name == "served"
    assert loaded.companion is not None and loaded.companion.spec.name == "one"
    assert loaded.companion.companion is None and loaded.companion.decoder is not loaded.decoder
    [entry] = from_mapping({"models": [{"path": "a", "companion": "b"}]}).models
    assert (entry.path, entry.companion) == ("a", "b")
    with pytest.raises(ConfigError, match="companion must be"):
        from_mapping({"models": [{"companion": 1}]})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--companion", "c"], [("bundled", "c")]),
        (["--model", "a", "--model", "b", "--companion", "c"], [("a", "c"), ("b", "c")]),
        (["--model", "a"], [("a", "")]),
        (["--config", "FILE", "--companion", "c"], [("x", "c"), ("y", "c")]),
        (["--config", "FILE"], [("x", ""), ("y", "d")]),
    ],
)
def test_the_command_line_names_it(given: list[str], expected: list[tuple[str, str]], tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[[models]]\npath = "x"\n[[models]]\npath = "y"\ncompanion = "d"\n')
    parser = argparse.ArgumentParser()
    add_config(parser)
    found = read_config(parser.parse_args([str(file) if word == "FILE" else word for word in given]))
    assert [(m.path, m.companion) for m in found.models] == expected
