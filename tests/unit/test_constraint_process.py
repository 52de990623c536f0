"""The child process: bombs end as typed refusals in time, and it goes on after each."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from constraint_bombs import ALL
from grammars import bundled_tokenizer, bundled_vocabulary
from llguidance import LLMatcher, LLParserLimits

from mmserve.constraint.cache import Outcomes, key_of
from mmserve.constraint.child import Child
from mmserve.constraint.findings import Refused
from mmserve.constraint.grammar import Grammar
from mmserve.constraint.limits import PARSER_LIMITS
from mmserve.constraint.process import Compiler
from mmserve.constraint.service import Grammars
from mmserve.constraint.vocabulary import BYTES, Vocabulary, trie_of
from mmserve.core.constraint import Choice, ConstraintKind, ConstraintMode, ConstraintSpec, JsonSchema, Lark, Regex
from mmserve.errors import InvalidArgument, Unavailable

PATIENCE = 20.0  # seconds; the limit itself is two, and the machine may be busy


def spec(kind: ConstraintKind, mode: ConstraintMode = ConstraintMode.STRICT) -> ConstraintSpec:
    return ConstraintSpec(kind, mode)


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(BYTES)
    yield made
    made.close()


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    made = Compiler(BYTES, 2.0)
    yield made
    made.close()


@pytest.mark.parametrize("name", ALL)
def test_a_bomb_is_refused_with_its_place(grammars: Grammars, name: str) -> None:
    kind, pointer, keyword = ALL[name]
    began = time.monotonic()
    with pytest.raises(InvalidArgument) as caught:
        grammars.grammar(spec(kind))
    assert time.monotonic() - began < PATIENCE
    found = [(v.field.partition("#")[2], v.description.partition(":")[0]) for v in caught.value.violations]
    assert (pointer, keyword) in found
    assert all(len(v.description) < 1000 for v in caught.value.violations), "a refusal quotes the constraint"


_MANY = {f"p{i}": {"type": "string", "pattern": f"a{{{i}}}"} for i in range(4999)}
SLOW = {
    "steps_that_multiply": {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
    "five_thousand_properties": {"type": "object", "properties": _MANY},
}


@pytest.mark.parametrize("name", SLOW)
def test_what_takes_too_long_is_killed_and_the_next_one_served(compiler: Compiler, name: str) -> None:
    assert isinstance(compiler.compile(spec(Choice(("a",))))[0], Grammar)  # the child has started
    before, began = compiler.pid, time.monotonic()
    outcome, lasting = compiler.compile(spec(JsonSchema(json.dumps(SLOW[name]))))
    assert time.monotonic() - began < PATIENCE
    assert isinstance(outcome, Refused)
    if not lasting:
        assert "takes more than 2 s" in str(outcome)
        assert compiler.pid != before
    assert isinstance(compiler.compile(spec(Choice(("a",))))[0], Grammar)


def test_a_child_that_dies_is_replaced(compiler: Compiler) -> None:
    assert isinstance(compiler.compile(spec(Regex("a+")))[0], Grammar)
    assert compiler.pid is not None
    os.kill(compiler.pid, signal.SIGKILL)
    outcome, _ = compiler.compile(spec(Regex("b+")))
    assert isinstance(outcome, Grammar)


def test_who_kills_a_child_does_not_refuse_what_it_was_at(compiler: Compiler) -> None:
    compiler.compile(spec(Regex("a")))
    first, second = compiler.pid, standing_by(compiler)
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    killer = threading.Timer(0.2, os.kill, (first, signal.SIGKILL))
    killer.start()
    outcome, lasting = compiler.compile(spec(Regex("b")))
    killer.join()
    assert isinstance(outcome, Grammar) and lasting
    assert compiler.pid == second


def test_where_every_child_is_killed_nothing_is_said_of_the_constraint(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Child.ask

    def killed(self: Child, message: Any, seconds: float) -> Any:
        if seconds == 2.0:  # a constraint, no vocabulary
            os.kill(self.pid, signal.SIGKILL)
        return ask(self, message, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(Child, "ask", killed)
        with pytest.raises(Unavailable, match="try again"):
            compiler.compile(spec(Regex("a")))
    assert isinstance(compiler.compile(spec(Regex("a")))[0], Grammar)


def test_memory_is_limited(compiler: Compiler) -> None:
    compiler.compile(spec(Regex("a")))
    limits = Path(f"/proc/{compiler.pid}/limits").read_text().splitlines()
    address = next(line for line in limits if line.startswith("Max address space"))
    assert str(1 << 30) in address


def test_the_child_imports_no_torch(compiler: Compiler) -> None:
    compiler.compile(spec(Regex("a")))
    maps = Path(f"/proc/{compiler.pid}/maps").read_text()
    assert "llguidance" in maps
    assert "torch" not in maps


def test_closing_ends_the_child(compiler: Compiler) -> None:
    compiler.compile(spec(Regex("a")))
    pid = compiler.pid
    compiler.close()
    compiler.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(Unavailable):
        compiler.compile(spec(Regex("a")))


def standing_by(compiler: Compiler) -> int:
    """The process id of the child that stands by, once it does."""
    end = time.monotonic() + PATIENCE
    while compiler.standby is None:
        assert time.monotonic() < end, "no child stands by"
        time.sleep(0.005)
    return compiler.standby


def test_a_killed_child_is_replaced_by_one_that_stood_by(compiler: Compiler) -> None:
    compiler.compile(spec(Regex("a")))
    first, second = compiler.pid, standing_by(compiler)
    assert first is not None and first != second
    os.kill(first, signal.SIGSTOP)
    outcome, lasting = compiler.compile(spec(Regex("b")))
    assert isinstance(outcome, Refused) and not lasting
    assert not Path(f"/proc/{first}").exists()
    assert isinstance(compiler.compile(spec(Regex("b")))[0], Grammar)
    assert compiler.pid == second, "it had read the vocabulary already"
    assert standing_by(compiler) not in (first, second)


def test_a_standby_that_dies_is_not_asked(compiler: Compiler) -> None:
    compiler.compile(spec(Regex("a")))
    assert compiler.pid is not None
    for pid in (standing_by(compiler), compiler.pid):
        os.kill(pid, signal.SIGKILL)
    assert isinstance(compiler.compile(spec(Regex("b")))[0], Grammar)


@pytest.mark.parametrize("starting", [True, False])
def test_closing_does_not_wait_for_a_child_that_hangs(starting: bool) -> None:
    made = Compiler(BYTES, 600.0)
    ended: list[object] = []

    def ask() -> None:
        try:
            ended.append(made.compile(spec(Regex("b"))))
        except Unavailable as error:
            ended.append(error)

    if not starting:
        made.compile(spec(Regex("a")))
        standing_by(made)
        assert made.pid is not None
        os.kill(made.pid, signal.SIGSTOP)
    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.05)  # it waits for the child to start, or for its answer
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 5
    asking.join(PATIENCE)
    assert len(ended) == 1 and isinstance(ended[0], Unavailable)
    assert made.pid is None and made.standby is None


def test_many_threads_may_ask_at_once(grammars: Grammars) -> None:
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: texts.append(grammars.grammar(spec(Regex(f"a{{{i % 3 + 1}}}"))).text))
        for i in range(9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(texts) == 9
    assert len(set(texts)) == 3


def test_modes_differ_in_what_is_not_enforced(grammars: Grammars) -> None:
    schema = JsonSchema('{"type":"array","items":{"type":"integer"},"uniqueItems":true}')
    with pytest.raises(InvalidArgument, match="uniqueItems"):
        grammars.grammar(spec(schema))
    checked = grammars.grammar(spec(schema, ConstraintMode.VALIDATE))
    ignored = grammars.grammar(spec(schema, ConstraintMode.LENIENT))
    assert not checked.exact and not ignored.exact
    assert "is checked" in checked.warnings[0] and "is not enforced" in ignored.warnings[0]
    assert checked.text == ignored.text


def test_no_mode_takes_what_is_malformed(grammars: Grammars) -> None:
    for mode in ConstraintMode:
        with pytest.raises(InvalidArgument):
            grammars.grammar(spec(JsonSchema('{"type": "strin"}'), mode))


def test_an_outcome_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ConstraintSpec] = []
    real = Compiler.compile

    def counting(self: Compiler, one: ConstraintSpec) -> tuple[Grammar | Refused, bool]:
        asked.append(one)
        return real(self, one)

    monkeypatch.setattr(Compiler, "compile", counting)
    made = Grammars(BYTES)
    try:
        good, bad = spec(Regex("a+")), spec(Regex("("))
        assert made.grammar(good) == made.grammar(good)
        for _ in range(2):
            with pytest.raises(InvalidArgument):
                made.grammar(bad)
        assert asked == [good, bad]
    finally:
        made.close()


def test_the_cache_is_bounded_and_forgets_the_oldest() -> None:
    outcomes = Outcomes(10_000)
    for name in "abcdefghijkl":
        outcomes.put(name.encode(), Grammar(name * 500, True, ()))
        outcomes.get(b"a")
    assert outcomes.used <= 10_000
    assert outcomes.get(b"a") is not None
    assert outcomes.get(b"b") is None
    outcomes.put(b"large", Grammar("x" * 20_000, True, ()))
    assert outcomes.get(b"large") is None


def test_keys_tell_everything_apart() -> None:
    kinds: list[ConstraintKind] = [Regex("a"), Lark("a"), Choice(("a",)), Choice(("a", "b")), JsonSchema("a")]
    other = Vocabulary((*BYTES.tokens[:-1], b"x"), 256)
    keys = {
        key_of(spec(kind, mode), vocabulary.fingerprint())
        for kind in kinds
        for mode in ConstraintMode
        for vocabulary in (BYTES, other)
    }
    assert len(keys) == len(kinds) * 3 * 2
    assert all(len(key) == 32 for key in keys)


def test_grammars_are_proved_with_the_models_own_tokens() -> None:
    vocabulary = bundled_vocabulary()
    made = Grammars(vocabulary)
    try:
        schema = '{"type":"object","properties":{"shape":{"enum":["circle","square"]},"n":{"type":"integer"}}}'
        text = made.grammar(spec(JsonSchema(schema))).text
        with pytest.raises(InvalidArgument, match="has no sentence"):
            made.grammar(spec(JsonSchema('{"type":"string","pattern":"^\\\\u0001$"}')))
    finally:
        made.close()
    at = LLMatcher(trie_of(vocabulary), text, limits=LLParserLimits(**PARSER_LIMITS))
    written = bundled_tokenizer().encode('{"shape": "circle", "n": 3}', add_special_tokens=False)
    assert at.consume_tokens(written) and at.is_accepting()


def test_long_tokens_do_no_harm() -> None:
    """llguidance panics over them while it builds its trie."""
    made = Grammars(Vocabulary((*BYTES.tokens[:256], b"x" * 100_000, b""), 257))
    try:
        assert made.grammar(spec(Regex("x+"))).exact
    finally:
        made.close()


def test_lone_surrogates_pass_the_pipe(grammars: Grammars) -> None:
    with pytest.raises(InvalidArgument, match="surrogate"):
        grammars.grammar(spec(Lark('start: "\ud800"')))


def test_the_child_runs_nothing_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mmserve").mkdir()
    (tmp_path / "mmserve" / "__init__.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    made = Compiler(BYTES, 2.0)
    try:
        assert isinstance(made.compile(spec(Choice(("a",))))[0], Grammar)
    finally:
        made.close()
