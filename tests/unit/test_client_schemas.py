"""Python types as schemas: what the grammar of a type accepts is what pydantic reads as that type."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import random
import re
import subprocess
import sys
import typing
import uuid
from typing import Annotated, Any, Literal, NamedTuple, Optional

import pydantic
import pytest
import typing_extensions
from grammars import schema_matcher, sentence
from pydantic import BaseModel, ConfigDict, Field, Json, StringConstraints, TypeAdapter

from mmserve.client.outgoing import build_request
from mmserve.client.schemas import reader, schema_text
from mmserve.errors import InvalidArgument

Decimal = decimal.Decimal


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


@pydantic.dataclasses.dataclass
class Checked:
    size: Annotated[int, Field(ge=0, le=9)]


class Pair(NamedTuple):
    name: str
    count: int


class Inner(typing.TypedDict):  # of typing, which pydantic alone refuses before Python 3.12
    ok: bool


class Movie(typing.TypedDict, total=False):
    title: typing_extensions.Required[str]
    inner: Inner


class Shape(BaseModel):
    color: Color
    corners: list[Point] = []


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    known: bool


class Scene(BaseModel):
    shapes: list[Shape]
    best: Shape | None = None


class Node(BaseModel):
    value: bool
    next: Optional[Node] = None  # noqa: UP045 - pydantic resolves it later


class Tree(BaseModel):
    kids: list[Tree]


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: bool


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    loud: bool


class Encoded(BaseModel):
    model_config = ConfigDict(val_json_bytes="base64")
    data: bytes


TYPES: dict[str, Any] = {
    "TypedDict": Movie,
    "dataclass": Point,
    "pydantic dataclass": Checked,
    "NamedTuple": Pair,
    "Enum": Color,
    "IntEnum": Level,
    "Literal": Literal["a", 1, True, None],
    "Union": int | Color,
    "list": list[int],
    "TypeAdapter": TypeAdapter(list[bool]),
    "model": Scene,
    "recursive model": Node,
    "discriminated union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "int": int,
    "float": pydantic.FiniteFloat,
    "multiple of": Annotated[int, Field(multiple_of=3, ge=-9)],
    "multiple of a decimal": Annotated[float, Field(multiple_of=0.1, ge=0, le=5)],
    "Decimal": Decimal,
    "Decimal with places": Annotated[Decimal, Field(max_digits=5, decimal_places=2)],
    "Decimal with digits": Annotated[Decimal, Field(max_digits=3)],
    "Decimal above zero": Annotated[Decimal, Field(gt=0, decimal_places=1)],
    "timedelta": dt.timedelta,
    "timedelta with bounds": Annotated[dt.timedelta, Field(gt=dt.timedelta(0), le=dt.timedelta(hours=1))],
    "date": dt.date,
    "past date": pydantic.PastDate,
    "future date": pydantic.FutureDate,
    "days of a week": Annotated[dt.date, Field(ge=dt.date(2024, 2, 26), lt=dt.date(2024, 3, 4))],
    "date of an era": Annotated[dt.date, Field(ge=dt.date(1990, 6, 1), le=dt.date(2010, 6, 1))],
    "datetime": dt.datetime,
    "naive datetime": pydantic.NaiveDatetime,
    "aware datetime": pydantic.AwareDatetime,
    "past datetime": pydantic.PastDatetime,
    "future datetime": pydantic.FutureDatetime,
    "time": dt.time,
    "UUID": uuid.UUID,
    "UUID4": pydantic.UUID4,
    "UUID7": pydantic.UUID7,
    "bytes": bytes,
    "bytes of a length": Annotated[bytes, Field(min_length=2, max_length=4)],
    "base64 bytes": Encoded,
    "Base64Bytes": pydantic.Base64Bytes,
    "Base64Str": pydantic.Base64Str,
    "Base64UrlStr": pydantic.Base64UrlStr,
    "pattern": Annotated[str, Field(pattern=r"^\d{2}-[a-f]+$")],
    "stripped": Annotated[str, StringConstraints(strip_whitespace=True, min_length=2)],
    "AnyUrl": pydantic.AnyUrl,
    "HttpUrl": pydantic.HttpUrl,
    "FileUrl": pydantic.FileUrl,
    "PostgresDsn": pydantic.PostgresDsn,
    "IPv4Address": ipaddress.IPv4Address,
    "IPv6Address": ipaddress.IPv6Address,
    "IPv4Network": ipaddress.IPv4Network,
    "IPv6Network": ipaddress.IPv6Network,
    "IPv4Interface": ipaddress.IPv4Interface,
    "IPvAnyAddress": pydantic.IPvAnyAddress,
    "Path": pathlib.Path,
    "set": set[int],
    "frozenset of at least one": Annotated[frozenset[bool], Field(min_length=1)],
    "set of two colors": Annotated[set[Color], Field(min_length=2)],
    "tuple": tuple[int, Color],
    "long tuple": tuple[bool, ...],
    "SecretStr": pydantic.SecretStr,
    "complex": complex,
    "Fraction": fractions.Fraction,
    "re.Pattern": re.Pattern[str],
    "ByteSize": pydantic.ByteSize,
    "dict of int": dict[int, bool],
    "dict of float": dict[float, bool],
    "dict of bool": dict[bool, int],
    "dict of Enum": dict[Color, bool],
    "dict of Literal": dict[Literal["a", "b"], bool],
    "dict of UUID": dict[uuid.UUID, bool],
    "dict of date": dict[dt.date, bool],
    "dict of pattern": dict[Annotated[str, Field(pattern="^[a-c]{2}$")], bool],
    "Json": Json[Any],
    "Json of list": Json[list[int]],
    "Json of model": Json[Pair],
    "Json of object": Json[Shape],
    "Json of dict": Json[dict[str, float]],
}
DRAWN = 12


@pytest.mark.parametrize("name", TYPES)
def test_pydantic_reads_every_document_that_is_drawn(name: str) -> None:
    kind, chance = TYPES[name], random.Random(name)
    read, seen = reader(kind), set()
    assert read is not None
    at = schema_matcher(json.loads(schema_text(kind)))
    for _ in range(4 * DRAWN):
        document = sentence(at, chance, longest=400)
        if document is not None and document not in seen:
            seen.add(document)
            read(document)  # raises where pydantic does not read it
        if len(seen) >= DRAWN:
            break
    assert seen


def read(kind: Any, document: str) -> Any:
    found = reader(kind)
    assert found is not None
    return found(document)


def test_parsed_is_of_the_type() -> None:
    assert read(Movie, '{"title": "x"}') == {"title": "x"}
    assert read(Point, '{"x": 1}') == Point(1)
    assert read(Checked, '{"size": 3}') == Checked(3)
    assert read(Pair, '["a", 2]') == Pair("a", 2)
    assert read(Color, '"red"') is Color.RED
    assert read(Literal["a", "b"], '"a"') == "a"
    assert read(int | bool, "3") == 3
    assert read(list[int], "[1, 2]") == [1, 2]
    assert read(TypeAdapter(set[int]), "[1, 1]") == {1}
    assert read(dict[int, Color], '{"1": "red"}') == {1: Color.RED}
    assert read(Scene, '{"shapes": []}') == Scene(shapes=[])
    assert read(Decimal, "1.50") == Decimal("1.5")


def test_models_are_closed_unless_they_are_open() -> None:
    for kind in (Scene, Point, Checked, Movie, list[Shape]):
        schema = json.loads(schema_text(kind))
        objects = [node for node in (schema, *schema.get("$defs", {}).values()) if "properties" in node]
        assert objects and all(node["additionalProperties"] is False for node in objects), kind
    assert json.loads(schema_text(Open))["additionalProperties"] is True
    assert schema_matcher(json.loads(schema_text(Open)))


def test_the_tag_of_a_discriminated_union_always_comes() -> None:
    schema = json.loads(schema_text(TYPES["discriminated union"]))
    assert "oneOf" not in schema and all("kind" in node["required"] for node in schema["$defs"].values())


WRAPPED = {"name": "answer", "strict": True, "schema": {"type": "integer"}}


@pytest.mark.parametrize(
    "given",
    [
        {"type": "integer"},
        '{"type": "integer"}',
        WRAPPED,
        json.dumps(WRAPPED),
        {"type": "json_schema", "json_schema": WRAPPED},
        {"type": "json_schema", **WRAPPED},
    ],
)
def test_json_text_and_the_wrappers_of_openai(given: Any) -> None:
    assert json.loads(schema_text(given)) == {"type": "integer"}
    assert read(given, "3") == 3


def test_a_schema_with_properties_called_name_and_schema_is_no_wrapper() -> None:
    given = {"type": "object", "properties": {"name": True, "schema": True}}
    assert json.loads(schema_text(given)) == given


class Callback(BaseModel):
    call: typing.Callable[[], None]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("{", "no JSON"),
        ("[1]", "must be an object"),
        ({"type": "json_schema", "json_schema": {}}, "must have a schema"),
        (3, "pydantic has no schema of 3"),
        (object(), "pydantic has no schema"),
        (pydantic.FilePath, "files that exist on the client"),
        (Callback, "Callable"),
        (dict[Annotated[int, Field(gt=3)], bool], "keys of a dictionary"),
        (Json[Tree], "refers to itself"),
        (Annotated[dt.date, Field(gt=dt.date(2024, 1, 1), lt=dt.date(2024, 1, 2))], "no date is"),
    ],
)
def test_what_is_no_schema_is_refused_before_it_is_sent(given: Any, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told) as caught:
        build_request("x", (), deltas=False, snapshots=False, schema=given)
    assert [violation.field for violation in caught.value.violations] == ["schema"]


def test_without_pydantic_mappings_and_text_work_and_types_say_what_is_missing() -> None:
    code = """
import sys
sys.modules["pydantic"] = None
from mmserve.client.schemas import reader, schema_text
assert schema_text('{"type": "integer"}') == schema_text({"type": "integer"}) == '{"type": "integer"}'
assert reader({"type": "integer"})("3") == 3
try:
    schema_text(list[int])
except TypeError as error:
    assert "pip install pydantic" in str(error)
else:
    raise AssertionError
assert "mmserve.client.python_types" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Branch(typing_extensions.TypedDict):
    name: str
    parts: list[Branch]


class OldBranch(typing.TypedDict):
    parts: list[OldBranch]


def test_a_typed_dictionary_may_hold_others_of_its_type() -> None:
    assert schema_matcher(json.loads(schema_text(Branch)))
    read = reader(Branch)
    assert read is not None
    assert read('{"name": "a", "parts": [{"name": "b", "parts": []}]}')["parts"] == [{"name": "b", "parts": []}]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="pydantic takes typing.TypedDict there")
def test_one_of_typing_that_holds_itself_is_refused() -> None:
    with pytest.raises(TypeError, match=r"typing_extensions\.TypedDict"):
        schema_text(OldBranch)
