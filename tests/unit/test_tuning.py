"""Which policies decode a request that names none: the measured curve, its file, and what the literature says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import sure_above

from mmserve.capabilities import Capabilities
from mmserve.config import BUNDLED, EngineConfig, MediaConfig, ModelConfig
from mmserve.core.request import Policy
from mmserve.core.tuning import Measured, Pair, Tuning, fastest
from mmserve.decode.policies import Offered
from mmserve.defaults import literature, tuning_of
from mmserve.errors import ConfigError
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.names import SHIPPED, shipped_folder
from mmserve.models.policy_file import PolicyFile, load_policies, save_policies
from mmserve.models.registry import load_model
from mmserve.tune.measure import Answer, agreement, figures, pairs_for
from mmserve.tune.prompts import Prompt, bundled_prompts, read_prompts
from mmserve.wire.models import from_model_info, to_model_info
from mmserve.wire.policies import named

PLAIN = Pair.named("none", "low_confidence")
DUAL = Pair(Policy(name="dual"), Policy(name="threshold", options={"confidence": 0.9}))
LOOSE = Pair(Policy(name="dual"), Policy(name="threshold", options={"confidence": 0.5}))
LEARNED = Pair(Policy(name="dual"), Policy(name="learned", options={"threshold": 0.96}))
NESTED = Pair(Policy(name="dual"), Policy(name="early_commit", base=LOOSE.commit))


def row(pair: Pair, quality: float, time_ratio: float, **changes: Any) -> Measured:
    given = {"accuracy": None, "agreement": quality, "same": quality, "forwards": 4.5, **changes}
    return Measured(pair=pair, quality=quality, time_ratio=time_ratio, **given)


CURVE = (row(PLAIN, 1.0, 1.0), row(DUAL, 0.995, 0.1), row(LOOSE, 0.975, 0.05), row(NESTED, 0.9, 0.01))
TUNED = Tuning(source="policy.json", plain=PLAIN, default=DUAL, curve=CURVE)


def written(folder: Path, *, plain: Pair = PLAIN, default: Pair = DUAL, curve: tuple[Measured, ...] = CURVE) -> Path:
    path = folder / "policy.json"
    save_policies(path, plain, default, list(curve), {"prompts": 3})
    return path


def loaded(path: Path) -> PolicyFile:
    found = load_policies(path)
    assert found is not None
    return found


def tuned(model: LoadedModel, path: Path, offered: Offered | None = None) -> Tuning:
    with_file = dataclasses.replace(model, policies=loaded(path))
    offered = offered or Offered.by(model)
    return Capabilities(with_file, EngineConfig(max_tokens=128), MediaConfig(), offered).tuning


# --- the choice ---


@pytest.mark.parametrize(
    ("quality", "pair"),
    [
        ("exact", PLAIN),
        ("balanced", DUAL),
        ("fast", LOOSE),
        (1.0, PLAIN),
        (0.996, PLAIN),
        (0.995, DUAL),
        (0.98, DUAL),
        (0.5, NESTED),
    ],
)
def test_a_quality_is_the_fastest_pair_that_was_measured_to_reach_it(quality: str | float, pair: Pair) -> None:
    assert TUNED.pair(quality) == pair


def test_without_a_measurement_a_least_quality_is_plain_decoding() -> None:
    unmeasured = Tuning(source="literature", plain=PLAIN, default=DUAL)
    assert [unmeasured.pair(q) for q in ("exact", "balanced", "fast", 0.5)] == [PLAIN, DUAL, DUAL, PLAIN]


def test_among_pairs_as_fast_as_each_other_the_closest_to_plain_decoding_is_taken() -> None:
    close = [row(LOOSE, 0.99, 0.100), row(DUAL, 1.0, 0.105), row(PLAIN, 1.0, 1.0), row(NESTED, 1.0, 0.12)]
    found = fastest(close, 0.99)
    assert found is not None and found.pair == DUAL
    assert fastest(close, 1.01) is None
    drafts = [row(PLAIN, 1.0, 1.0), row(DUAL, 1.0, 0.95), row(LOOSE, 1.0, 0.93)]
    found = fastest(drafts, 0.99)
    assert found is not None and found.pair == PLAIN, "what may be chance is no reason to leave plain decoding"


@pytest.mark.parametrize(
    ("attention", "shift", "cache", "confidence"),
    [
        (Attention.FULL, 0, "dual", 0.9),
        (Attention.FULL, 1, "prefix", 0.9),
        (Attention.PREFIX, 0, "prefix", 0.9),
        (Attention.BLOCK_CAUSAL, 0, "block", 0.95),
        (Attention.BLOCK_CAUSAL, 1, "block", 0.9),
    ],
)
def test_the_literature_has_a_pair_for_each_kind_of_diffusion(
    model: LoadedModel, attention: Attention, shift: int, cache: str, confidence: float
) -> None:
    spec = dataclasses.replace(model.spec, attention=attention, logit_shift=shift)
    pair = Pair(Policy(name=cache), Policy(name="threshold", options={"confidence": confidence}))
    assert literature(spec) == pair


def test_next_token_models_are_decoded_plainly_where_nothing_was_measured(model: LoadedModel) -> None:
    spec = dataclasses.replace(model.spec, attention=Attention.CAUSAL, logit_shift=1)
    causal = dataclasses.replace(model, spec=spec)
    found = tuning_of(causal, ("last", "none"), ("low_confidence", "ngram"), Offered.by(causal))
    plain = Pair.named("last", "low_confidence")
    assert (found.source, found.plain, found.default) == ("plain", plain, plain)


# --- the file ---


def test_a_file_is_the_default_and_says_how_it_was_measured(model: LoadedModel, tmp_path: Path) -> None:
    found = tuned(model, written(tmp_path))
    assert found == dataclasses.replace(TUNED, measured={"prompts": 3})
    info = Capabilities(
        dataclasses.replace(model, policies=loaded(tmp_path)),
        EngineConfig(max_tokens=128),
        MediaConfig(),
        Offered.by(model),
    ).describe({})
    assert (info.recompute_policy, info.commit_policy) == ("dual", "threshold")
    sent = dataclasses.replace(info, end_ids=())
    assert from_model_info(to_model_info(info)) == sent, "the curve is the same over the wire"


def test_what_this_server_lacks_of_a_file_is_left_out(
    model: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, default=LEARNED, curve=(*CURVE, row(LEARNED, 1.0, 0.02)))
    without = tuned(model, path)
    assert without.default == DUAL and without.figures(LEARNED) is None
    assert "learned" in caplog.text and str(path) in caplog.text
    filtered = dataclasses.replace(model, commit_filter=sure_above(0.5))
    assert tuned(filtered, path, Offered.by(filtered)).default == LEARNED


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: "{", "JSON"),
        (lambda data: [], "policy file"),
        (lambda data: {**data, "format": 2}, "format"),
        (lambda data: {k: v for k, v in data.items() if k != "default"}, "'default' is missing"),
        (lambda data: {**data, "curve": [{**data["curve"][0], "time_ratio": 0}]}, "time_ratio"),
        (lambda data: {**data, "curve": [{**data["curve"][0], "quality": "good"}]}, "quality"),
        (lambda data: {**data, "default": {"recompute": {"name": "dual"}}}, "'commit' is missing"),
    ],
)
def test_a_broken_file_is_refused_with_what_to_do(tmp_path: Path, change: Any, said: str) -> None:
    path = written(tmp_path)
    changed = change(json.loads(path.read_text()))
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(ConfigError, match=said) as raised:
        load_policies(path)
    assert str(path) in str(raised.value) and "`mmserve tune`" in str(raised.value)


@pytest.mark.parametrize(
    ("default", "said"),
    [
        (Pair.named("last", "low_confidence"), "no policy 'last'"),
        (Pair.named("dual", "nonsense"), "no policy 'nonsense'"),
        (Pair(Policy(name="dual"), Policy(name="threshold", options={"confidence": -1})), "above 0"),
        (Pair(Policy(name="dual"), Policy(name="threshold", options={"sure": 1})), "sure"),
        (Pair(Policy(name="dkv_decode", options={"refresh": 2.5}), Policy(name="threshold")), "refresh"),
    ],
)
def test_a_file_of_another_kind_of_model_is_refused(
    model: LoadedModel, tmp_path: Path, default: Pair, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        tuned(model, written(tmp_path, default=default))
    assert "`mmserve tune`" in str(raised.value)


def test_a_file_that_compares_with_other_decoding_is_refused(model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another kind of model"):
        tuned(model, written(tmp_path, plain=DUAL))


def test_a_configuration_names_a_file_or_none(tmp_path: Path) -> None:
    path = written(tmp_path)
    file = load_model(ModelConfig(policies=str(path))).policies
    assert file is not None and file.path == path
    assert load_model(ModelConfig(policies="off")).policies is None
    with pytest.raises(ConfigError, match="no policy file"):
        load_model(ModelConfig(policies=str(tmp_path / "nowhere.json")))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_bundled_model_has_its_curve(name: str) -> None:
    model = load_model(ModelConfig(path=name))
    assert model.policies is not None and model.policies.path.parent == shipped_folder(name)
    info = Capabilities(model, EngineConfig(), MediaConfig(), Offered.by(model)).describe({})
    found = info.policies
    default = found.figures(found.default)
    assert found.source == "policy.json" and default is not None
    assert default.quality >= 0.99 and found.measured["prompts"] >= 60
    assert all(row.pair in pairs_for(info) for row in found.curve)
    if name == BUNDLED:
        assert default.time_ratio < 1 / 8 and default.forwards < 5


# --- what is measured ---


def answer(text: str, *tokens: int, forwards: int = 1, seconds: float = 1.0) -> Answer:
    return Answer(text, tokens, forwards, seconds)


def test_agreement_is_the_share_of_tokens_in_the_same_order() -> None:
    assert agreement((1, 2, 3), (1, 2, 3)) == agreement((), ()) == 1.0
    assert agreement((1, 2, 3, 4), (2, 3, 4)) == 0.75, "one token more shifts the others, and changes none of them"
    assert agreement((1,), ()) == 0.0


def test_quality_is_that_of_the_worse_of_free_and_constrained_prompts() -> None:
    yes = {"text": "x", "right": lambda text: text == "yes"}
    prompts = [Prompt(**yes), Prompt(**yes), Prompt(text="free"), Prompt(**yes, schema={}), Prompt(**yes, schema={})]
    plain = [answer("yes", 1), answer("no", 2), answer("a", 1, 2, 3, 4), answer("yes", 1), answer("yes", 1)]
    mine = [answer("yes", 1), answer("no", 3), answer("b", 1, 2, 3, 5), answer("yes", 1), answer("no", 2, seconds=0.5)]
    found = figures(DUAL, prompts, mine, plain)
    assert found.quality == 0.5, "one of two constrained answers; the free ones reach 1.75 of 2"
    assert (found.accuracy, found.same) == (0.5, 0.6)
    assert found.time_ratio == 0.9 and found.agreement == pytest.approx((1 + 0 + 0.75 + 1 + 0) / 5)
    free = figures(DUAL, prompts[:3], mine[:3], plain[:3])
    assert free.quality == 0.875
    assert figures(PLAIN, prompts, plain, plain).quality == 1.0


def test_where_plain_decoding_is_never_right_quality_is_the_agreement_with_it() -> None:
    prompts = [Prompt(text="x", right=lambda _text: False)]
    assert figures(DUAL, prompts, [answer("b", 1, 2, 3, 5)], [answer("a", 1, 2, 3, 4)]).quality == 0.75


def test_every_pair_can_be_asked_for(model: LoadedModel) -> None:
    filtered = dataclasses.replace(model, commit_filter=sure_above(0.5))
    offered = Offered.by(filtered)
    info = Capabilities(filtered, EngineConfig(max_tokens=128), MediaConfig(), offered).describe({})
    pairs = pairs_for(info)
    assert pairs[0] == PLAIN and DUAL in pairs and LEARNED in pairs
    for pair in pairs:
        assert named(pair.recompute) and named(pair.commit)
    assert LEARNED not in pairs_for(dataclasses.replace(info, commit_policies=("low_confidence", "threshold")))


# --- prompts ---


def test_prompts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    lines = [
        {"text": "one", "truth": "yes", "max_new_tokens": 8},
        {"text": "two", "images": ["a.png"], "schema": {"type": "object"}, "truth": {"a": 1}},
        {"text": "three"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    one, two, three = read_prompts(path)
    assert one.right is not None and one.right(" yes\n") and not one.right("no") and one.max_new_tokens == 8
    assert two.right is not None and two.right('{"a": 1}') and not two.right("{") and two.images == [b"picture"]
    assert two.schema == {"type": "object"} and three.right is None and three.schema is None


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """Texts of JSON may hold every other separator of lines as it is."""
    texts = ["one\u2028more", "two\u2029more", "three\x85more"]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes("\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts).encode())
    assert [prompt.text for prompt in read_prompts(path)] == texts


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "has no lines"),
        ("{", "line 1: Expecting property name"),
        ("[]", "line 1: it must be a JSON object"),
        ('{"text": "x", "image": "a.png"}', "unknown key 'image'"),
        ('{"text": "x", "images": "a.png"}', "must be a list of paths"),
        ('{"text": "x", "images": ["nowhere.png"]}', "nowhere.png"),
        ('{"text": "x", "schema": "{}"}', "'schema' must be"),
        ('{"text": "x", "max_new_tokens": 0}', "'max_new_tokens' must be"),
    ],
)
def test_a_wrong_prompt_is_named_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=said):
        read_prompts(path)


def test_the_bundled_prompts_have_truths_and_schemas_and_differ_by_seed() -> None:
    prompts = bundled_prompts(10, 1)
    assert all(prompt.right is not None for prompt in prompts)
    assert 0 < sum(prompt.schema is not None for prompt in prompts) < len(prompts)
    assert prompts[0].images != bundled_prompts(1, 2)[0].images
