"""The three stages of one model, connected by transports; each can run in a separate process."""

from __future__ import annotations

from mmserve.decode.state import Answer
from mmserve.stages.decode import DecodeStage
from mmserve.stages.encode import EncodeStage
from mmserve.stages.joined import Stages
from mmserve.stages.prefill import PrefillStage
from mmserve.stages.prompt import EncodedPrompt

__all__ = ["Answer", "DecodeStage", "EncodeStage", "EncodedPrompt", "PrefillStage", "Stages"]
