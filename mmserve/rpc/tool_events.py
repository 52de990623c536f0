"""The events of a request with tools as its client gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mmserve.core.events import Event, Failed, Finished
from mmserve.core.info import ModelInfo
from mmserve.core.request import Request
from mmserve.rpc.tool_messages import named_tools, named_warnings
from mmserve.tools.answer import ToolAnswers
from mmserve.tools.formats import FORMATS
from mmserve.tools.grammar import openings


def tool_events(request: Request, info: ModelInfo) -> Callable[[Event], Iterable[Event]]:
    """A function that converts each event of ``request``, answered by the model of ``info``: calls are separated from
    text, and errors and warnings name the tools."""
    if (use := request.tools) is None:
        return lambda event: (event,)
    form = FORMATS[info.tool_format]
    answers = ToolAnswers(form, openings(use, form), streams=request.streaming.deltas)

    def converted(event: Event) -> Iterable[Event]:
        if isinstance(event, Failed):
            return (Failed(named_tools(event.error, use)),)
        return answers.of(named_warnings(event, use) if isinstance(event, Finished) else event)

    return converted
