"""ModelService: models and adapters that the server serves; loads and unloads them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from mmserve.config import ServerConfig
from mmserve.core.values import values
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.rpc.auth import check_admin
from mmserve.rpc.engines import AdaptersLike, EngineLike, Engines, adapters_of
from mmserve.rpc.loading import Loading
from mmserve.rpc.status import handler
from mmserve.v1 import model_pb2, model_pb2_grpc
from mmserve.video.host import Hosts
from mmserve.wire.models import to_model_info
from mmserve.wire.plain import to_message

logger = logging.getLogger("mmserve.rpc")


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """Lists and describes the models, the default one first."""

    def __init__(self, engines: Engines, hosts: Hosts, loading: Loading) -> None:
        self._engines, self._hosts, self._loading = engines, hosts, loading

    @handler
    async def ListModels(self, message: model_pb2.ListModelsRequest, context: Any) -> model_pb2.ListModelsResponse:
        """All loaded models, with their capabilities, limits and defaults; UNAVAILABLE while there are none."""
        return model_pb2.ListModelsResponse(models=[self._described(e) for e in self._engines.any_ready()])

    @handler
    async def DescribeModel(
        self, message: model_pb2.DescribeModelRequest, context: Any
    ) -> model_pb2.DescribeModelResponse:
        """One model; NOT_FOUND lists the known ones; UNAVAILABLE while it is loading."""
        engine = self._engines.find(message.model)
        return model_pb2.DescribeModelResponse(model=self._described(engine))

    @handler
    async def LoadModel(self, message: model_pb2.LoadModelRequest, context: Any) -> model_pb2.LoadModelResponse:
        """Load a checkpoint in the server's folder and serve it in addition to the others."""
        check_admin("load or unload models")
        engine = await self._loading.add(message.path, message.name, message.dtype)
        return model_pb2.LoadModelResponse(model=self._described(engine))

    @handler
    async def UnloadModel(self, message: model_pb2.UnloadModelRequest, context: Any) -> model_pb2.UnloadModelResponse:
        """Stop serving a model; returns once its requests have ended and its memory is free."""
        check_admin("load or unload models")
        seconds = message.drain_seconds if message.HasField("drain_seconds") else None
        accepted = values(ServerConfig)["drain_seconds"].range
        if seconds is not None and accepted is not None and not accepted.holds(seconds):
            raise InvalidArgument.of("drain_seconds", f"must be {accepted.words}, not {seconds:g}")
        return model_pb2.UnloadModelResponse(ended=await self._loading.drop(message.model, seconds))

    @handler
    async def LoadAdapter(self, message: model_pb2.LoadAdapterRequest, context: Any) -> model_pb2.LoadAdapterResponse:
        """Load an adapter in the server's folder for a model, on a separate thread."""
        check_admin("load or drop adapters")
        info = await asyncio.to_thread(self._adapters(message.model).load, message.adapter)
        logger.info("loaded the adapter %s of %s, %d bytes", info.name, message.model, info.bytes)
        return model_pb2.LoadAdapterResponse(adapter=to_message(info, model_pb2.AdapterInfo()))

    @handler
    async def ListAdapters(
        self, message: model_pb2.ListAdaptersRequest, context: Any
    ) -> model_pb2.ListAdaptersResponse:
        """The adapters of a model that requests can use."""
        listed = self._adapters(message.model).listed()
        return model_pb2.ListAdaptersResponse(adapters=[to_message(i, model_pb2.AdapterInfo()) for i in listed])

    @handler
    async def DropAdapter(self, message: model_pb2.DropAdapterRequest, context: Any) -> model_pb2.DropAdapterResponse:
        """Stop serving an adapter; NOT_FOUND if it is not loaded."""
        check_admin("load or drop adapters")
        await asyncio.to_thread(self._adapters(message.model).drop, message.adapter)
        logger.info("dropped the adapter %s of %s", message.adapter, message.model)
        return model_pb2.DropAdapterResponse()

    def _adapters(self, model: str) -> AdaptersLike:
        engine = self._engines.find(model)
        found = adapters_of(engine)
        if found is None:
            raise Unimplemented(f"adapters of {engine.info.name!r} cannot be loaded")
        return found

    def _described(self, engine: EngineLike) -> model_pb2.ModelInfo:
        return to_model_info(replace(engine.info, sessions=self._hosts.takes_sessions(engine)))
