"""The result of ``generate``, from the events that a request finished with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, cast

from mmserve.client.schemas import Schema, reader
from mmserve.client.tools import Call, ToolLike, readers
from mmserve.core import events
from mmserve.core.request import Message, TextPart
from mmserve.core.session import Moment
from mmserve.errors import Unavailable

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)  # ``Result`` alone is ``Result[Any]``
else:
    from typing import TypeVar

    T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Result(events.Finished, Generic[T]):
    """A finished answer: its final event, and the client's additional data. ``times`` are milliseconds.

    For a request with several samples it is the first; ``samples`` has all.
    """

    request_id: str
    moments: tuple[Moment, ...] = ()  # for a video session: times that the text mentions
    others: tuple[Result[T], ...] = ()  # the other samples
    prompt: events.Prefilled | None = None  # the prompt as the model got it, if requested
    read: Callable[[str], T] | None = field(default=None, repr=False, compare=False)  # reads an answer to a ``schema``
    readers: Mapping[str, Callable[[str], Any]] = field(default_factory=dict, repr=False, compare=False)  # of tools

    @property
    def finish_reason(self) -> str:
        """``end``, ``stop``, ``length`` or ``tool_calls``."""
        return self.reason

    @property
    def calls(self) -> tuple[Call, ...]:
        """The tool calls, in order, with values of the tools' types."""
        known = self.readers
        return tuple(Call(c.id, c.name, c.arguments, known.get(c.name, json.loads)) for c in self.tool_calls)

    @property
    def message(self) -> Message:
        """The answer as a message, for the next turn of the chat; with ``cut_call``, which has no result."""
        calls = self.tool_calls if self.cut_call is None else (*self.tool_calls, self.cut_call)
        return Message("assistant", (TextPart(self.text),) if self.text else (), calls)

    @property
    def samples(self) -> tuple[Result[T], ...]:
        """Every sample in order, this one first."""
        return (self, *self.others)

    @property
    def parsed(self) -> T:
        """The answer to a request with ``schema``: a value, or an instance of its class. None without a schema, if a
        stop string truncated the answer, or if it calls tools. Raises the validation errors of a class that is stricter
        than its schema."""
        other = self.finish_reason == "stop" or self.tool_calls or self.cut_call is not None
        return cast(T, None) if self.read is None or other else self.read(self.text)


def to_result(
    received: Sequence[events.Event],
    samples: int,
    request_id: str,
    schema: Schema | None = None,
    moments: Mapping[int, tuple[Moment, ...]] | None = None,
    tools: Sequence[ToolLike] | None = None,
) -> Result[Any]:
    """The result from the events of ``samples`` samples, in any order; raises ``Unavailable`` if one has no end.
    ``schema`` and ``tools``: the request's; ``moments``: for a video session, by sample."""
    done = [event for event in received if isinstance(event, events.Finished)]
    prompts = {event.sample: event for event in received if isinstance(event, events.Prefilled)}
    if sorted(event.sample for event in done) != list(range(samples)):
        raise Unavailable("the server ended the stream without an answer")
    own: dict[str, Any] = {"request_id": request_id, "read": reader(schema), "readers": readers(tools)}
    first, *others = (
        Result(**vars(event), **own, moments=(moments or {}).get(event.sample, ()), prompt=prompts.get(event.sample))
        for event in sorted(done, key=lambda event: event.sample)
    )
    return replace(first, others=tuple(others))
