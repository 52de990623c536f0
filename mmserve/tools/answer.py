"""Separates the events of an answer that may call tools into text and calls."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from mmserve.core.events import Delta, Event, Finished, ToolCallDelta
from mmserve.core.tools import ToolCall
from mmserve.tools.formats import ToolFormat
from mmserve.tools.parse import CallReader, Piece, TextPiece


@dataclass
class _Sample:
    reader: CallReader
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def take(self, pieces: list[Piece], sample: int) -> Iterator[Event]:
        """The deltas of ``pieces``; also stores the pieces."""
        for piece in pieces:
            if isinstance(piece, TextPiece):
                self.text += piece.text
                yield Delta(piece.text, sample)
            elif piece.index == len(self.calls):
                self.calls.append(ToolCall(f"call_{uuid.uuid4().hex[:24]}", piece.name, piece.arguments))
                yield ToolCallDelta(piece.index, self.calls[-1].id, piece.name, piece.arguments, sample)
            else:
                call = self.calls[piece.index]
                self.calls[piece.index] = replace(call, arguments=call.arguments + piece.arguments)
                yield ToolCallDelta(piece.index, arguments=piece.arguments, sample=sample)


class ToolAnswers:
    """Parses the calls in the events of one request, in the model's format ``form``.

    ``openings``: see ``CallReader``. ``streams``: whether text and calls are sent in deltas.
    """

    def __init__(self, form: ToolFormat, openings: tuple[str, ...] = (), *, streams: bool) -> None:
        self._samples: defaultdict[int, _Sample] = defaultdict(lambda: _Sample(CallReader(form, openings)))
        self._streams = streams

    def of(self, event: Event) -> Iterator[Event]:
        """The events that replace ``event`` for the client."""
        if isinstance(event, Delta):
            sample = self._samples[event.sample]
            yield from sample.take(sample.reader.feed(event.text), event.sample)
        elif isinstance(event, Finished):
            sample = self._samples[event.sample]
            pieces = [] if self._streams else sample.reader.feed(event.text)
            rest = list(sample.take([*pieces, *sample.reader.end()], event.sample))
            yield from rest if self._streams else ()
            calls = tuple(sample.calls[: len(sample.calls) - sample.reader.inside])  # a stop string may cut one
            cut = sample.calls[-1] if sample.reader.inside else None
            reason = "tool_calls" if calls and event.reason == "end" else event.reason
            yield replace(event, text=sample.text, tool_calls=calls, cut_call=cut, reason=reason)
        else:
            yield event
