"""Routes of the HTTP front end, with access control, tenants, limits and errors for each request."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from functools import lru_cache
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mmserve import __version__
from mmserve.core.events import Admitted, Event, Prefilled
from mmserve.core.request import TextPart, TokensPart
from mmserve.core.tenant import Tenant
from mmserve.errors import Internal, MMServeError
from mmserve.http import checks, openapi
from mmserve.http.api import Api
from mmserve.http.body import Bodies
from mmserve.http.chat import Chat
from mmserve.http.completions import Completions
from mmserve.http.connections import FULL
from mmserve.http.decisions import DECISION_APIS, DecisionApi
from mmserve.http.errors import BadRequest, TooManyConnections, headers_of, renamed, status_of
from mmserve.http.event_stream import EventStream, ended
from mmserve.http.large import response_of
from mmserve.http.media import fields_of
from mmserve.http.messages import Messages
from mmserve.http.models import Models
from mmserve.http.pages import Pages
from mmserve.http.presence import Present
from mmserve.http.prompts import Prompts
from mmserve.http.responses import Responses
from mmserve.http.tokens import Tokens
from mmserve.observe import calls
from mmserve.rpc.auth import check_admin
from mmserve.rpc.fetching import urls_in
from mmserve.rpc.generation import logged
from mmserve.rpc.server import Server
from mmserve.tenants import is_loopback
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire import request_id

logger = logging.getLogger("mmserve.http")

Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")
_BEARER = "bearer "
#: The headers with the request id, for OpenAI's clients and Anthropic's.
_ID_HEADERS = (request_id.KEY, "request-id")
#: Maximum length of a host with its port: a DNS name has at most 253 characters.
_HOST_LETTERS = 300
CONSTRAINTS, COUNTS = "/v1/constraints", "/v1/messages/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
_MODEL = "/v1/models/{name:path}"
CHAT = Chat()
#: APIs that generate, by path.
APIS: dict[str, Api] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": Completions(),
    "/v1/fim/completions": Completions(fim=True),
    "/v1/messages": Messages(),
    "/v1/responses": Responses(),
}


class App:
    """The ASGI application of ``server``; used on its event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._alone = is_loopback(server.config.server.host)
        # One thread: reading and writing JSON hold the GIL, so that two would not be faster.
        self._parser = ThreadPoolExecutor(1, "mmserve-http-parse")
        # One thread: a constraint that is slow to compile delays only other checks.
        self._checker = ThreadPoolExecutor(1, "mmserve-http-check")
        # One thread: long prompts whose tokens are asked for delay only others of these.
        self._tokenizer = ThreadPoolExecutor(1, "mmserve-http-tokens")
        self._prompts = Prompts(server)
        self._models = Models(server.engines)
        self._bodies = Bodies(server.config.server, server.budget, self._parser)
        tokens = Tokens(server, self._bodies, self._events, self._tokenizer)
        posts = {
            **{path: self._open(self._generates(api), api) for path, api in APIS.items()},
            CONSTRAINTS: self._open(self._checked),
            COUNTS: self._open(tokens.count, APIS["/v1/messages"]),
            TOKENIZE: self._open(tokens.tokenize),
            DETOKENIZE: self._open(tokens.detokenize),
            **{path: self._open(self._decides(api), api) for path, api in DECISION_APIS.items()},
        }
        others = Starlette(
            routes=[
                *(Route(path, answer, methods=["POST"]) for path, answer in posts.items()),
                *Pages([*posts], server.guard.auth).routes,
                Route("/v1/models", self._open(self._models.listed), methods=["GET"]),
                Route(_MODEL, self._open(self._models.one, route=_MODEL), methods=["GET"]),
                Route("/openapi.json", self._open(self._description), methods=["GET"]),
                Route("/metrics", self._open(self._metrics, always=True), methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/version", self._open(_version), methods=["GET"]),
            ],
            exception_handlers={HTTPException: _no_route},
        )

        async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
            # Avoids Starlette's middleware, which took a tenth of the time of a short request: handlers convert all
            # errors.
            answer = posts.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
            if answer is None:
                await others(scope, receive, send)
            else:
                await (await answer(Request(scope, receive, send)))(scope, receive, send)

        self.asgi: ASGIApp = asgi

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self._parser, self._checker, self._tokenizer):
            pool.shutdown(wait=False, cancel_futures=True)

    def _open(
        self, handler: Handler, api: Api | DecisionApi = CHAT, route: str = "", *, always: bool = False
    ) -> Handler:
        """``handler`` for callers with an accepted token, with errors in the format of ``api``; ``calls.current()`` is
        its call.

        ``route``: the route's name, for paths with a variable part. ``always``: whether it is also served on
        connections beyond the limit.
        """

        async def answer(request: Request) -> Response:
            call = calls.current()
            call.route = route
            call.request_id = _request_id(request)
            try:
                if FULL in request.scope and not always:
                    raise TooManyConnections(request.scope[FULL])
                self._check_host(request)
                tenant = self._server.guard.auth.tenant_of(_token(request), request.scope["path"], call.peer)
                call.tenant = tenant.name
                request.state.tenant = tenant
                response = await handler(request)
            except MMServeError as error:
                response = _refusal(api, error)
            except Exception as error:  # noqa: BLE001 - a bug ends this request alone
                response = _refusal(api, Internal.logged(error, request.scope["path"], logger))
            response.headers.update(dict.fromkeys(_ID_HEADERS, call.request_id))
            if self._server.ending:  # so that a client's next request can reach another server
                response.headers["connection"] = "close"
            return response

        return answer

    def _check_host(self, request: Request) -> None:
        """Refuse browsers whose page has another host name that resolves to this server (DNS rebinding).

        Only for a server on loopback without tokens, which has no other protection.
        """
        config = self._server.config.server
        if self._server.guard.auth.guards or not self._alone:
            return
        given = request.headers.get("host", "")
        name, leads_here = _host(given) if len(given) <= _HOST_LETTERS else (given, False)
        if not (leads_here or name == config.host or name in config.http_names):
            why = f"{name[:100]!r} is not a name of this server: use localhost, or add the name to [server] http_names"
            raise BadRequest(HTTPStatus.MISDIRECTED_REQUEST, why)

    async def _health(self, _request: Request) -> Response:
        loading = self._server.engines.loading
        ready = not loading and not self._server.ending
        return JSONResponse({"status": "ok" if ready else "unavailable"}, 200 if ready else 503)

    async def _metrics(self, request: Request) -> Response:
        check_admin(
            "read metrics, which are of all tenants ([server] metrics_port asks for no token)", request.state.tenant
        )
        data = await asyncio.get_running_loop().run_in_executor(None, generate_latest, self._server.metrics.served)
        return Response(data, media_type=CONTENT_TYPE_LATEST)

    async def _description(self, _request: Request) -> Response:
        return JSONResponse(openapi.document(self._models.names))

    async def _checked(self, request: Request) -> Response:
        """Whether a constraint can be enforced; always status 200, because an invalid constraint is an expected
        result."""
        tenant: Tenant = request.state.tenant
        with self._server.quotas.taken(tenant):
            message, answer, names = checks.read(await self._bodies.read(request))
            engine = self._server.engines.named(message.model)
            with Present(request.receive):  # a check that waits for others is dropped if its client disconnects
                try:
                    asked = self._server.generations.read(uuid.uuid4().hex, message, tenant, engine)
                    loop = asyncio.get_running_loop()
                    found = await loop.run_in_executor(self._checker, engine.check_constraint, asked, answer)
                except MMServeError as error:
                    return JSONResponse(checks.verdict(error, names))
        if found is None:
            return JSONResponse(checks.UNCHECKED)
        judged = {} if answer is None else {"answer": checks.verdict(found.wrong, names)}
        return JSONResponse({**checks.verdict(None, names), "warnings": list(found.warnings), **judged})

    def _generates(self, api: Api) -> Handler:
        """The handler of a generating API."""

        async def answer(request: Request) -> Response:
            tenant: Tenant = request.state.tenant
            with ExitStack() as held:
                held.enter_context(self._server.quotas.taken(tenant))
                body = await self._bodies.read(request)
                asked = api.read(body)
                if asked.prompts:
                    self._prompts.take(asked, tenant, held)
                if asked.fits:
                    info = self._server.engines.find(self._server.engines.split(asked.message.model)[0]).info
                    most = min(info.max_tokens, info.max_canvas or info.max_tokens)
                    asked.message.sampling.max_new_tokens = min(asked.message.sampling.max_new_tokens, most)
                places = fields_of(urls_in(asked.message.messages), body)
                events = self._events(asked.message, tenant, held, places, asked.prompts)
                del body
                with renamed({**api.names, **asked.names}, asked.places):
                    held.enter_context(Present(request.receive))
                    if not asked.stream:
                        async with aclosing(events):
                            finished, prompts = await ended(events)
                        return await response_of(asked.reply, finished, prompts, self._parser)
                    begun = [await anext(events)]  # refusals have their own status until the response begins
                    while isinstance(begun[-1], Prefilled):
                        begun.append(await anext(events))
                return EventStream(api, asked.reply, begun, events, held.pop_all())

        return answer

    def _decides(self, api: DecisionApi) -> Handler:
        """The handler of an API for typed questions."""

        async def answer(request: Request) -> Response:
            tenant: Tenant = request.state.tenant
            own, label = uuid.uuid4().hex, calls.current().request_id
            with ExitStack() as held, logged(own, label):
                held.enter_context(self._server.quotas.taken(tenant))
                body = await self._bodies.read(request)
                asked = api.read(body)
                fields = fields_of(urls_in(asked.message.messages), body)
                deciding = self._server.deciding.decide(own, [asked.message], tenant, None, held, fields)
                held.enter_context(Present(request.receive))
                with renamed(api.names, asked.places):
                    return JSONResponse(api.reply(asked, await deciding))

        return answer

    async def _events(
        self,
        message: pb.GenerateRequest,
        tenant: Tenant,
        held: ExitStack,
        fields: dict[str, str],
        prompts: Sequence[TextPart | TokensPart] = (),
    ) -> AsyncGenerator[Event]:
        """Events of the request after its admission; the first once the answer begins.

        ``fields``: locations of media URLs in the body. ``prompts``: see ``ParsedRequest``; their samples follow those
        of the request. The number of new tokens is a maximum: if fewer fit after the prompt, it is reduced.
        """
        own, label = uuid.uuid4().hex, calls.current().request_id
        with logged(own, label), self._server.generations.watch() as watch:
            files = await self._server.generations.fetched(message, fields)
            engine, request = self._server.generations.accepted(own, message, tenant, None, held, watch, files)
            del files, message
            logger.info("request %s for %s (%s: %s)", own, request.model, request_id.KEY, label)
            answer = self._prompts.answered(engine, request, watch, prompts, held)
            async with aclosing(answer) as events:
                async for event in events:
                    if not isinstance(event, Admitted):
                        yield event


def _refusal(api: Api | DecisionApi, error: MMServeError) -> Response:
    return JSONResponse(api.error(error), status_of(error), headers_of(error))


async def _no_route(request: Request, error: Exception) -> Response:
    """The API's error for an unknown path or method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}: {error.detail}"
    body: dict[str, Any] = {"error": {"message": what, "type": "invalid_request_error", "param": None, "code": None}}
    if request.url.path.startswith("/v1/messages"):
        kind = "not_found_error" if error.status_code == HTTPStatus.NOT_FOUND else "invalid_request_error"
        body = {"type": "error", "error": {"type": kind, "message": what}}
    ids = dict.fromkeys(_ID_HEADERS, _request_id(request))
    return JSONResponse(body, error.status_code, {**(error.headers or {}), **ids})


async def _version(_request: Request) -> Response:
    return JSONResponse({"version": __version__})


def _request_id(request: Request) -> str:
    """The client's own id of the request if it is valid, else a new one."""
    label = request.headers.get(request_id.KEY, "")
    return label if request_id.is_label(label) else uuid.uuid4().hex


@lru_cache(maxsize=256)
def _host(given: str) -> tuple[str, bool]:
    """The name in a host header, and whether it is a loopback name or address."""
    try:
        name = urlsplit(f"//{given}").hostname or ""
    except ValueError:
        name = ""
    return name, is_loopback(name)


def _token(request: Request) -> str | None:
    """The token in ``Authorization: Bearer``, or in Anthropic's ``x-api-key``."""
    given = request.headers.get("authorization", "")
    if given.lower().startswith(_BEARER):
        return given[len(_BEARER) :]
    return request.headers.get("x-api-key")
