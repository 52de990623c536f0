"""Messages of a chat in bodies: roles, and contents that are a text or an array of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from mmserve.errors import InvalidArgument
from mmserve.http.fields import Fields
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire import enums

#: Reads the other fields of a part, which it takes; ``type`` of the part to reader.
Readers = Mapping[str, Callable[[Fields], pb.ContentPart]]
#: Names of roles in bodies, to ours.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def text_part(fields: Fields) -> pb.ContentPart:
    """A part with a ``text``."""
    return pb.ContentPart(text=fields.take("text", str, ""))


def refusal_part(fields: Fields) -> pb.ContentPart:
    """What an assistant said in place of an answer, as a text."""
    return pb.ContentPart(text=fields.take("refusal", str, ""))


def message(role: str, content: Any, path: str, readers: Readers) -> pb.ChatMessage:
    """A message with the ``content`` at ``path``; raises ``InvalidArgument``."""
    if isinstance(content, str):
        parts = [pb.ContentPart(text=content)]
    elif isinstance(content, list):
        parts = [_part(part, f"{path}[{i}]", readers) for i, part in enumerate(content)]
    else:
        raise InvalidArgument.of(path, "must be a string or an array of parts")
    return pb.ChatMessage(role=pb.Role.Name(enums.number_of(enums.ROLES, ROLES[role], "role")), parts=parts)


def results_of_text(messages: Iterable[pb.ChatMessage]) -> Iterator[pb.ChatMessage]:
    """``messages``, in which the results of tools are text alone: images in them go to the user's message after them,
    or are one."""
    media: list[pb.ContentPart] = []
    for each in messages:
        if each.role == pb.ROLE_TOOL:
            media += (part for part in each.parts if part.WhichOneof("part") != "text")
            texts = [part for part in each.parts if part.WhichOneof("part") == "text"] or [pb.ContentPart(text="")]
            yield pb.ChatMessage(role=each.role, parts=texts, tool_call_id=each.tool_call_id)
            continue
        if media and each.role != pb.ROLE_USER:
            yield pb.ChatMessage(role=pb.ROLE_USER, parts=media)
        elif media:
            each = pb.ChatMessage(role=each.role, parts=[*media, *each.parts])
        media = []
        yield each
    if media:
        yield pb.ChatMessage(role=pb.ROLE_USER, parts=media)


def role_of(fields: Fields, known: tuple[str, ...]) -> str:
    """The ``role`` of a message, one of ``known``; raises ``InvalidArgument``."""
    role = fields.take("role", str, "")
    if role not in known:
        raise InvalidArgument.of(fields.path("role"), f"must be one of {', '.join(map(repr, known))}")
    return str(role)


def _part(part: Any, path: str, readers: Readers) -> pb.ContentPart:
    fields = Fields.of(part, path)
    kind = fields.take("type", str, "")
    if kind not in readers:
        raise InvalidArgument.of(f"{path}.type", f"must be one of {', '.join(map(repr, readers))}")
    found = readers[kind](fields)
    fields.end()
    return found
