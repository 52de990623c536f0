"""``/v1/models``: the models and adapters of the server, for clients of OpenAI and of Anthropic."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mmserve.rpc.engines import Engines

#: The creation time of models, which Anthropic's clients require.
_UNKNOWN_DATE = "1970-01-01T00:00:00Z"
#: The fields of ``ModelInfo`` in the list of models.
_DESCRIBED = (
    *("diffusion", "images", "videos", "recompute_policies", "commit_policies", "recompute_policy", "commit_policy"),
    *("pruners", "max_tokens", "max_new_tokens", "block_length", "tool_format"),
)


class Models:
    """The handlers of the list of models and of one model."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    @property
    def names(self) -> list[str]:
        """All models, each followed by its adapters."""
        return [name for each in self._engines for name in self._engines.names_of(each)]

    async def listed(self, _request: Request) -> Response:
        """All models."""
        names = self.names
        pages = {"has_more": False, "first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return JSONResponse({"object": "list", "data": [self._described(name) for name in names], **pages})

    async def one(self, request: Request) -> Response:
        """The model, or the adapter of a model, with the name in the path."""
        name = request.path_params["name"]
        if not name:  # the URL ends with a slash
            return await self.listed(request)
        self._engines.named(name)
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        info = self._engines.find(self._engines.split(name)[0]).info  # an adapter may have been dropped meanwhile
        own = {field: getattr(info, field) for field in _DESCRIBED}
        common = {"id": name, "object": "model", "created": 0, "owned_by": "mmserve", "max_model_len": info.max_tokens}
        return {**common, "type": "model", "display_name": name, "created_at": _UNKNOWN_DATE, "mmserve": own}
