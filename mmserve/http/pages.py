"""The playground: a page and its modules, which are files of this package, and the server information that it needs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from mmserve import __version__
from mmserve.rpc.auth import BearerAuth

#: Paths of the page's files; the page itself is ``/``.
FOLDER = "/playground"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "png": "image/png",
    "svg": "image/svg+xml",
}
#: Content security policy: nothing from other hosts, no inline code, and no framing.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "cache-control": "no-cache",  # cached, and revalidated each time
}


class Pages:
    """The routes of the playground; its files are read once.

    They need no token, because they contain no secrets; the page asks for a token if ``auth`` requires one.
    """

    def __init__(self, apis: Sequence[str], auth: BearerAuth) -> None:
        self._apis, self._auth = list(apis), auth
        self._files = {
            path.name: (path.read_bytes(), _TYPES[path.name.rpartition(".")[2]])
            for path in files(__package__).joinpath("playground").iterdir()
            if path.is_file()
        }
        self.routes = [
            Route("/", self._page, methods=["GET"]),
            Route("/favicon.ico", self._icon, methods=["GET"]),
            Route(f"{FOLDER}/about.json", self._about, methods=["GET"]),
            *(Route(f"{FOLDER}/{name}", self._file, methods=["GET"]) for name in self._files),
        ]

    async def _page(self, request: Request) -> Response:
        return self._sent("index.html", request)

    async def _file(self, request: Request) -> Response:
        return self._sent(request.url.path.removeprefix(f"{FOLDER}/"), request)

    async def _icon(self, _request: Request) -> Response:
        return RedirectResponse(f"{FOLDER}/icon.svg", 301, _HEADERS)

    async def _about(self, _request: Request) -> Response:
        """Available paths, whether a token is required, and the version: information that is public."""
        about = {"version": __version__, "apis": self._apis, "tokens": self._auth.guards}
        return JSONResponse(about, headers=_HEADERS)

    def _sent(self, name: str, request: Request) -> Response:
        content, kind = self._files[name]
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {**_HEADERS, "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)
