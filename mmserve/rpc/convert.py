"""Between protobuf and ``mmserve.core``: requests in, events and models there and back.

A file for each of them, and for what requests are made of, lies beside this one (``…_messages.py``); nothing else knows
both.
"""

from mmserve.rpc.event_messages import from_response, to_response
from mmserve.rpc.model_messages import from_model_info, to_model_info
from mmserve.rpc.request_messages import to_request

__all__ = ["from_model_info", "from_response", "to_model_info", "to_request", "to_response"]
