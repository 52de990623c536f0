"""Large responses: written on a thread, choice by choice, so that the event loop is not blocked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

from starlette.responses import JSONResponse, Response

from mmserve.core.events import LARGE, Finished, Prefilled, scored
from mmserve.http.api import Reply


async def response_of(
    reply: Reply, finished: Sequence[Finished], prompts: Sequence[Prefilled], writer: Executor
) -> Response:
    """The response with these samples and prompts; ``writer`` runs what takes long."""
    if sum(map(scored, finished)) + sum(map(scored, prompts)) <= LARGE:
        return JSONResponse(reply.whole(finished, prompts))
    data = await asyncio.get_running_loop().run_in_executor(writer, _written, reply, finished, prompts)
    return Response(data, media_type="application/json")


def _written(reply: Reply, finished: Sequence[Finished], prompts: Sequence[Prefilled]) -> bytes:
    """The response as JSON. No call of the encoder, during which no other thread runs, writes more than one element of
    its lists."""
    members = (f"{_json(name)}:{_listed(value)}" for name, value in reply.whole(finished, prompts).items())
    return f"{{{','.join(members)}}}".encode()


def _listed(value: Any) -> str:
    return f"[{','.join(map(_json, value))}]" if isinstance(value, list) else _json(value)


def _json(value: Any) -> str:
    """``value`` as a ``JSONResponse`` has it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
