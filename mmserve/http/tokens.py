"""vLLM's ``/tokenize`` and ``/detokenize``, and Anthropic's ``/v1/messages/count_tokens``: the tokens of prompts.

Prompts of text are tokenised without a request to the engine; others are encoded by one, which ends without an answer.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mmserve.core.events import Event, Prefilled
from mmserve.core.tenant import Tenant
from mmserve.errors import InvalidArgument
from mmserve.http import chat, messages
from mmserve.http.api import model_in, required, take_neutral
from mmserve.http.body import Bodies
from mmserve.http.content import add_messages
from mmserve.http.errors import renamed
from mmserve.http.fields import Fields, typed
from mmserve.http.media import fields_of
from mmserve.http.presence import Present
from mmserve.http.tools import add_chat_tools
from mmserve.http.vllm import take_template_options
from mmserve.rpc.engines import EngineLike
from mmserve.rpc.fetching import urls_in
from mmserve.rpc.server import Server
from mmserve.v1 import generation_pb2 as pb

T = TypeVar("T")
#: The events of a request: of a message, a tenant, what it holds, and the locations of its media URLs.
Events = Callable[[pb.GenerateRequest, Tenant, ExitStack, dict[str, str]], AsyncGenerator[Event]]
#: Fields of chats only.
OF_CHATS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")
_SPECIAL = "add_special_tokens"
#: Numbers of an array that are written as JSON at once: the interpreter does nothing else meanwhile.
_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Prompt:
    """A prompt whose tokens are asked for.

    ``special_tokens``: whether a text has the tokenizer's special tokens; ``generation_prompt``: whether a chat ends
    with the beginning of an answer; ``strs``: whether the tokens' names are returned, too. ``names`` and ``places``: as
    in ``ParsedRequest``.
    """

    message: pb.GenerateRequest
    names: Mapping[str, str]
    places: Mapping[str, str] = field(default_factory=dict)
    special_tokens: bool = True
    generation_prompt: bool = True
    strs: bool = False


def read(body: dict[str, Any]) -> Prompt:
    """The prompt in a body of ``/tokenize``."""
    fields, found = Fields(body), pb.GenerateRequest()
    found.model = model_in(fields)
    text, strs = fields.take("prompt", str), fields.take("return_token_strs", bool, False)
    if (text is None) is not fields.has("messages"):
        raise InvalidArgument.of("prompt", "or messages must be set, one of them")
    if text is None:
        return _chat(fields, found, strs=strs)
    for name in OF_CHATS:
        if fields.has(name):
            raise InvalidArgument.of(name, "is only for messages")
    found.raw = True
    found.messages.add(role=pb.ROLE_USER).parts.add(text=text)
    special = fields.take(_SPECIAL, bool, True)
    fields.end()
    return Prompt(found, {**chat.NAMES, "messages": "prompt"}, special_tokens=special, strs=strs)


def _chat(fields: Fields, found: pb.GenerateRequest, *, strs: bool) -> Prompt:
    places = add_messages(found, map(chat.chat_message, fields.each("messages")))
    found.continue_final_message = fields.take("continue_final_message", bool, False)
    opened = fields.take("add_generation_prompt", bool, not found.continue_final_message)
    if opened and found.continue_final_message:
        raise InvalidArgument.of("add_generation_prompt", "must be false with continue_final_message")
    add_chat_tools(fields, found)
    take_template_options(fields, found)
    take_neutral(fields, {_SPECIAL: chat.NEUTRAL[_SPECIAL]}, ())
    fields.end()
    return Prompt(found, chat.NAMES, places, generation_prompt=opened or found.continue_final_message, strs=strs)


def read_ids(body: dict[str, Any]) -> tuple[str, list[int]]:
    """The model and the ids in a body of ``/detokenize``."""
    fields = Fields(body)
    model = model_in(fields)
    ids = [typed(each, int, f"tokens[{i}]") for i, each in enumerate(required(fields, "tokens", list))]
    fields.end()
    return model, ids


class Tokens:
    """Handlers of these paths; ``events``: those of a request that the server admits; ``tokenizer`` runs what takes
    long."""

    def __init__(self, server: Server, bodies: Bodies, events: Events, tokenizer: Executor) -> None:
        self._server, self._bodies, self._events, self._tokenizer = server, bodies, events, tokenizer

    async def count(self, request: Request) -> Response:
        """The number of tokens of a prompt."""
        with ExitStack() as held:
            body = await self._body(request, held)
            message, places = messages.read_counted(body)
            _engine, ids = await self._ids(Prompt(message, messages.NAMES, places), body, request, held)
            return JSONResponse({"input_tokens": len(ids)})

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a prompt."""
        with ExitStack() as held:
            body = await self._body(request, held)
            asked = read(body)
            engine, ids = await self._ids(asked, body, request, held)

            def written() -> bytes:
                strs = _array(engine.token_strs(ids)) if asked.strs else "null"
                known = f'"count": {len(ids)}, "max_model_len": {engine.info.max_tokens}'
                return f'{{{known}, "tokens": {_array(ids)}, "token_strs": {strs}}}'.encode()

            data = await self._run(written)
            return Response(data, media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        with ExitStack() as held:
            model, ids = read_ids(await self._body(request, held))
            engine = self._server.engines.named(model)
            held.enter_context(Present(request.receive))
            text = await self._run(engine.detokenized, ids)
            return JSONResponse({"prompt": text})

    async def _run(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer, call, *args)

    async def _body(self, request: Request, held: ExitStack) -> dict[str, Any]:
        """The body of a request that counts in the limits of its tenant until ``held`` is closed."""
        held.enter_context(self._server.quotas.taken(request.state.tenant))
        return await self._bodies.read(request)

    async def _ids(
        self, asked: Prompt, body: dict[str, Any], request: Request, held: ExitStack
    ) -> tuple[EngineLike, Sequence[int]]:
        """The engine, and the token ids of a prompt: from its text alone or, if that is not enough, by a request."""
        message, tenant = asked.message, request.state.tenant
        engine = self._server.engines.named(message.model)
        message.sampling.max_new_tokens, message.stream.prompt = 0, True
        held.enter_context(Present(request.receive))  # a client that disconnects is not waited for
        with renamed(asked.names, asked.places):
            if all(part.HasField("text") for each in message.messages for part in each.parts):
                given = self._server.generations.read(uuid.uuid4().hex, message, tenant, engine)
                how = asked.special_tokens, asked.generation_prompt
                return engine, await self._run(engine.prompt_ids, given, *how)
            if not asked.generation_prompt:
                raise InvalidArgument.of("add_generation_prompt", "must be true with images and videos")
            async with aclosing(
                self._events(message, tenant, held, fields_of(urls_in(message.messages), body))
            ) as sent:
                [prompt] = [event async for event in sent if isinstance(event, Prefilled)]
            return engine, prompt.prompt_ids


def _array(values: Sequence[int] | Sequence[str]) -> str:
    """``values`` as JSON, with pauses for other threads."""
    parts = (json.dumps(values[i : i + _AT_ONCE])[1:-1] for i in range(0, len(values), _AT_ONCE))
    return f"[{', '.join(parts)}]"
