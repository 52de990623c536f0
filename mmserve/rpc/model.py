"""ModelService: what the server serves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmserve.rpc.engines import EngineLike, Engines
from mmserve.rpc.status import errors_to_status
from mmserve.v1 import model_pb2, model_pb2_grpc
from mmserve.video.host import Hosts
from mmserve.wire.models import to_model_info


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """Lists and describes the models, the default one first."""

    def __init__(self, engines: Engines, hosts: Hosts) -> None:
        self._engines, self._hosts = engines, hosts

    async def ListModels(self, message: model_pb2.ListModelsRequest, context: Any) -> model_pb2.ListModelsResponse:
        """Every model that is loaded, with its capabilities, limits and defaults; UNAVAILABLE while there is none."""
        async with errors_to_status(context, "ListModels"):
            return model_pb2.ListModelsResponse(models=[self._described(e) for e in self._engines.any_ready()])
        raise AssertionError("unreachable: an error ends the call")

    async def DescribeModel(
        self, message: model_pb2.DescribeModelRequest, context: Any
    ) -> model_pb2.DescribeModelResponse:
        """One model; NOT_FOUND lists the known ones, UNAVAILABLE while it is loading."""
        async with errors_to_status(context, "DescribeModel"):
            engine = self._engines.find(message.model)
            return model_pb2.DescribeModelResponse(model=self._described(engine))
        raise AssertionError("unreachable: an error ends the call")

    def _described(self, engine: EngineLike) -> model_pb2.ModelInfo:
        return to_model_info(replace(engine.info, sessions=self._hosts.takes_sessions(engine)))
