"""A value that users see is declared once: messages, the SDK, the command line and the documentation agree with it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import documented
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from mmserve.cli import build_parser
from mmserve.client import Options, SessionOptions
from mmserve.core.constraint import ConstraintMode, ConstraintSampling, SchemaOption
from mmserve.core.options import AMOUNTS, DIFFUSION, PIXELS, REQUEST, SAMPLING, SESSION
from mmserve.core.policies import CLASSES, KINDS, policy_names
from mmserve.core.request import VideoSampling
from mmserve.core.session import FrameSampling, Memory
from mmserve.core.tools import ToolChoice
from mmserve.core.tuning import QUALITIES
from mmserve.core.values import Value, values
from mmserve.decode.commit import COMMIT
from mmserve.decode.recompute import RECOMPUTE
from mmserve.kv.reduction import REDUCTIONS
from mmserve.kv.reuse import REUSES
from mmserve.prune import PRUNERS
from mmserve.v1 import generation_pb2 as pb
from mmserve.v1 import video_pb2
from mmserve.video.memory import POLICIES as MEMORIES
from mmserve.wire import enums

PROTOS = Path(__file__).parents[2] / "protos" / "mmserve" / "v1"

#: Each kind of policy: the message and oneof that name it, the server's table, and what is in one of them only.
TABLES: dict[str, tuple[Any, str, Any, set[str]]] = {
    "recompute": (pb.DiffusionParams, "recompute", RECOMPUTE, set()),
    "commit": (pb.DiffusionParams, "commit", COMMIT, {"scheduler"}),  # made of the server's configuration
    "kv_reduction": (pb.KvReduction, "policy", REDUCTIONS, set()),
    "image_reuse": (pb.ImageReuse, "policy", REUSES, set()),
    "pruner": (pb.VisionParams, "pruner", PRUNERS, {"none"}),
}


def oneof(message: Any, name: str) -> dict[str, FieldDescriptor]:
    """Fields of a oneof by the names of their policies."""
    fields = message.DESCRIPTOR.oneofs_by_name[name].fields
    return {"none" if field.name == "no_cache" else field.name: field for field in fields}


@pytest.mark.parametrize("kind", KINDS)
def test_the_sdk_the_messages_and_the_server_have_the_same_policies(kind: str) -> None:
    message, name, table, special = TABLES[kind]
    assert set(policy_names(kind)) == set(oneof(message, name)) == set(table) | special


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "pruner"])
def test_a_policys_message_has_its_numbers_and_the_server_its_defaults(kind: str) -> None:
    message, name, table, special = TABLES[kind]
    for policy, field in oneof(message, name).items():
        declared = values(CLASSES.get(policy))
        there = {f.name for f in field.message_type.fields if f.message_type is None}
        assert set(declared) == there, f"{policy} has other numbers than its message"
        if policy not in special and policy in CLASSES:
            assert issubclass(table[policy], CLASSES[policy])
            own = {f: v.default for f, v in values(table[policy]).items()}
            assert own == {f: v.default for f, v in declared.items()}, f"{policy} has defaults of its own"


MESSAGES: list[tuple[Any, dict[str, Value]]] = [
    (pb.SamplingParams, SAMPLING),
    (pb.DiffusionParams, DIFFUSION),
    (pb.VisionParams, {**AMOUNTS, **PIXELS}),
    (pb.VideoSampling, values(VideoSampling)),
    (video_pb2.StreamMemory, values(Memory)),
    (video_pb2.FrameSampler, values(FrameSampling)),
]


@pytest.mark.parametrize(("message", "declared"), MESSAGES, ids=lambda v: getattr(v, "__name__", ""))
def test_a_messages_numbers_are_those_declared(message: Any, declared: dict[str, Value]) -> None:
    chosen = {"quality", "min_quality"}  # of what policies are chosen for
    there = {f.name for f in message.DESCRIPTOR.fields if f.message_type is None or is_map(f)} - chosen
    assert there == set(declared)


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def comments(text: str) -> dict[tuple[str, str], str]:
    """The comment above each field, by message and field."""
    found, message, said = {}, "", ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("message "):
            message = line.split()[1]
        if line.startswith("//"):
            said += line.removeprefix("//")
        else:
            if field := re.match(r"(?:optional |repeated )?\w+ (\w+) = \d+;", line):
                found[message, field[1]] = said
            said = ""
    return found


def test_the_protos_name_the_defaults_that_are_declared() -> None:
    said = comments((PROTOS / "generation.proto").read_text()) | comments((PROTOS / "video.proto").read_text())
    declared = [(message.DESCRIPTOR, values_of) for message, values_of in MESSAGES]
    for kind in KINDS:
        message, name, _table, _special = TABLES[kind]
        declared += [(f.message_type, values(CLASSES.get(p))) for p, f in oneof(message, name).items()]
    checked = 0
    for message, known in declared:
        for name, value in known.items():
            if value.default_words and isinstance(value.default, int | float) and not value.shown:
                text = said[message.name, name]
                shown = re.findall(r"[Dd]efault ([\w.]*\w)|([\w.]*\w) \(the default\)", text)
                assert any(value.default_words in pair for pair in shown) or "As in" in text, (
                    f"{message.name}.{name}: {text!r}"
                )
                checked += 1
    assert checked > 40


def test_enums_of_messages_have_the_names_that_the_code_has() -> None:
    assert set(enums.CONSTRAINT_MODES.values()) == set(ConstraintMode)
    assert set(enums.CONSTRAINT_SAMPLINGS.values()) == set(ConstraintSampling)
    assert set(enums.SCHEMA_OPTIONS.values()) == set(SchemaOption)
    assert set(enums.QUALITIES.values()) == set(QUALITIES)
    assert set(enums.OVERLOADS.values()) == {"block", "drop_oldest", "thin"}
    assert set(enums.ROLES.values()) == {"system", "user", "assistant", "tool"}
    assert set(enums.TOOL_CHOICES.values()) == set(ToolChoice)


def test_every_option_of_the_sdk_is_declared_and_every_declared_one_is_an_option() -> None:
    assert set(Options.__annotations__) == set(REQUEST) - {"overload"}
    assert set(SessionOptions.__annotations__) <= set(SESSION)
    assert set(values(FrameSampling)) | set(values(Memory)) - {"policy"} <= set(SessionOptions.__annotations__)
    assert all(name in MEMORIES for name in re.findall(r'"(\w+)"', (Memory.__doc__ or "").partition(";")[0]))


# --- the command line ---

#: Fields of a request that have no option of their own: what is there instead.
ELSEWHERE = {
    "messages.role": "--system, --chat",
    "messages.parts.text": "the prompt",
    "messages.parts.tokens.ids": "",  # for programs that have tokenized the prompt
    "messages.parts.image.data": "--image FILE",
    "messages.parts.image.media_id": "--image ID",
    "messages.parts.image.url": "--image URL",
    "messages.parts.video.data": "--video FILE",
    "messages.parts.video.media_id": "--video ID",
    "messages.parts.video.url": "--video URL",
    "messages.tool_call_id": "--chat",
    "required_tool": "--tool-choice NAME",
    "diffusion.min_quality": "--quality X",
    "constraint.json_schema": "--schema",
    "constraint.lark": "--grammar",
    "constraint.gbnf": "--grammar",
    "constraint.choice.options": "--choice",
    "constraint.template.parts": "--template",
    "constraint.mode": "--constraint-mode",
    "constraint.sampling": "--constraint-sampling",
    "constraint.schema_options": "--schema-option",
    "stream.deltas": "",  # one answer is printed when it is whole
    "stream.snapshots": "",  # shown on a terminal
    "stream.drafts": "",  # for viewers: the playground shows them
    "stream.prefilled": "",  # the usage of the whole answer has the same
    "stream.prompt": "--return-prompt",
}
#: Messages that one option reads as a whole, and what each of its fields is there.
WHOLE = {
    "VideoSampling": "--video-sampling",
    "KvReduction": "--kv-reduction",
    "ImageReuse": "--image-reuse",
    "Template": "--template",
    "SeedCanvas": "--seed-canvas",
    "Tool": "--tools",
    "ToolCall": "--chat",
}


def fields(message: Descriptor, path: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    """Fields of a request, those of messages that an option reads as a whole left out."""
    for field in message.fields:
        name = f"{path}{field.name}"
        inner, of = field.message_type, field.containing_oneof
        policy = of is not None and of.name in ("recompute", "commit", "pruner")
        if inner is None or inner.name in WHOLE or policy or is_map(field):
            yield name, field
        else:
            yield from fields(inner, f"{name}.")


def generate_options() -> dict[str, argparse.Action]:
    parser, _modules = build_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {flag: a for a in commands.choices["generate"]._actions for flag in a.option_strings}


def test_every_field_of_a_request_can_be_set_on_the_command_line() -> None:
    known = generate_options()
    missing = []
    for name, field in fields(pb.GenerateRequest.DESCRIPTOR):
        of = field.containing_oneof
        if field.message_type is not None and field.message_type.name in WHOLE:
            flag = WHOLE[field.message_type.name]
        elif of is not None and of.name in ("recompute", "commit", "pruner"):
            flag = f"--{of.name}"
        elif name in ELSEWHERE:
            flag = re.split(r"[ ,]", ELSEWHERE[name])[0]
        else:
            flag = f"--{field.name.replace('_', '-')}"
        if flag.startswith("--") and flag not in known:
            missing.append(f"{name}: no option {flag}")
    assert missing == []


def test_the_commands_help_has_every_declared_range_and_default() -> None:
    known = generate_options()
    for name, value in {**SAMPLING, **DIFFUSION, **AMOUNTS, **PIXELS}.items():
        said = (known[f"--{name.replace('_', '-')}"].help or "").replace("%%", "%")
        assert value.range is None or value.range.words in said
        assert value.default_words in said


# --- the documentation ---


@pytest.mark.parametrize("page", documented.pages(), ids=lambda page: page.stem)
def test_tables_of_the_documentation_are_those_of_the_declared_values(page: Path) -> None:
    text = page.read_text()
    assert text == documented.written(text), "run: python tests/documented.py"


def test_every_table_of_declared_values_is_in_the_documentation() -> None:
    shown = {name for page in documented.pages() for name in re.findall(r"<!-- values: (\w+) -->", page.read_text())}
    assert shown == set(documented.TABLES)


def test_the_sample_configuration_has_the_declared_defaults_and_meanings() -> None:
    assert documented.SAMPLE.read_text() == documented.sample(), "run: python tests/documented.py"


@pytest.mark.parametrize("page", documented.pages(), ids=lambda page: page.stem)
def test_a_page_opens_with_what_its_reader_does(page: Path) -> None:
    """A command, a program or a configuration within the first lines."""
    assert any(line.startswith("```") for line in page.read_text().splitlines()[:6])
