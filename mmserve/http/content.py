"""Messages of a chat in bodies: roles, and contents that are a text or an array of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmserve.errors import InvalidArgument
from mmserve.http.fields import Fields
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire import enums

#: Readers of the fields of a content part, by its ``type``.
Readers = Mapping[str, Callable[[Fields], pb.ContentPart]]
#: Roles by their names in bodies.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def text_part(fields: Fields) -> pb.ContentPart:
    """A part with a ``text``."""
    return pb.ContentPart(text=fields.take("text", str, ""))


def refusal_part(fields: Fields) -> pb.ContentPart:
    """An assistant's refusal, as a text part."""
    return pb.ContentPart(text=fields.take("refusal", str, ""))


def message(role: str, content: Any, path: str, readers: Readers) -> pb.ChatMessage:
    """A message with the ``content`` at ``path``; raises ``InvalidArgument``."""
    if isinstance(content, str):
        parts = [pb.ContentPart(text=content)]
    elif isinstance(content, list):
        parts = [part_of(part, f"{path}[{i}]", readers) for i, part in enumerate(content)]
    else:
        raise InvalidArgument.of(path, "must be a string or an array of parts")
    return pb.ChatMessage(role=pb.Role.Name(enums.number_of(enums.ROLES, ROLES[role], "role")), parts=parts)


@dataclass
class Placed:
    """A message, and its location in the body; ``inner``: locations of parts that differ from their index."""

    message: pb.ChatMessage
    path: str
    inner: dict[str, str] = field(default_factory=dict)


def add_messages(found: pb.GenerateRequest, given: Iterable[Placed]) -> dict[str, str]:
    """Add messages to ``found``. Returns their locations for ``errors.renamed``.

    Tool results become text only: images in them are moved to the following user message, or to a new one.
    """
    places = {}
    for i, each in enumerate(_results_of_text(given), len(found.messages)):
        found.messages.append(each.message)
        places[f"@[{i}]"] = each.path
        places |= {f"@[{i}].{name}": place for name, place in each.inner.items()}
    return places


def _results_of_text(messages: Iterable[Placed]) -> Iterator[Placed]:
    media: list[tuple[pb.ContentPart, str]] = []
    for each in messages:
        own = each.message
        if own.role == pb.ROLE_TOOL:
            parts = [(part, f"{each.path}.content[{i}]") for i, part in enumerate(own.parts)]
            media += (one for one in parts if one[0].WhichOneof("part") != "text")
            texts = [part for part, _ in parts if part.WhichOneof("part") == "text"] or [pb.ContentPart(text="")]
            yield Placed(pb.ChatMessage(role=own.role, parts=texts, tool_call_id=own.tool_call_id), each.path)
            continue
        if media and own.role != pb.ROLE_USER:
            yield _with(media, [], each.path)
        elif media:
            at = [each.inner.get(f"content[{i}]", f"{each.path}.content[{i}]") for i in range(len(own.parts))]
            each = _with(media, [*zip(own.parts, at, strict=True)], each.path)
        media = []
        yield each
    if media:
        yield _with(media, [], "messages")


def _with(media: list[tuple[pb.ContentPart, str]], parts: list[tuple[pb.ContentPart, str]], path: str) -> Placed:
    """A user message of ``media`` and ``parts``, each with its location."""
    both = [*media, *parts]
    message = pb.ChatMessage(role=pb.ROLE_USER, parts=[part for part, _ in both])
    return Placed(message, path, {f"content[{i}]": at for i, (_, at) in enumerate(both)})


def role_of(fields: Fields, known: tuple[str, ...]) -> str:
    """The ``role`` of a message, one of ``known``; raises ``InvalidArgument``."""
    role = fields.take("role", str, "")
    if role not in known:
        raise InvalidArgument.of(fields.path("role"), f"must be one of {', '.join(map(repr, known))}")
    return str(role)


def part_of(part: Any, path: str, readers: Readers) -> pb.ContentPart:
    """The part of a message at ``path``."""
    fields = Fields.of(part, path)
    kind = fields.take("type", str, "")
    if kind not in readers:
        raise InvalidArgument.of(f"{path}.type", f"must be one of {', '.join(map(repr, readers))}")
    found = readers[kind](fields)
    fields.end()
    return found
