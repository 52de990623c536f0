"""CPU cost of passing a request from one worker to the next on the same host, as a cluster does it."""

from __future__ import annotations

import socket
import statistics
import time
from collections import defaultdict
from contextlib import closing
from typing import Any

import numpy as np
import torch

from mmserve.cluster.link import Link
from mmserve.cluster.messages import Moved, Order
from mmserve.core.encoded import Encoded
from mmserve.core.handover import Handover
from mmserve.core.payloads import EncodedPayload
from mmserve.core.request import Message, Request, Stage, TextPart
from mmserve.plan.fit import Fit, Sample, fit
from mmserve.transfer.payloads import PAYLOADS
from mmserve.transfer.shared_memory import Arena, Reader

#: Repetitions for each size.
_TIMES = 15
_SIZES = (1 << 16, 1 << 19, 1 << 21, 1 << 23)


def handover_costs() -> Fit:
    """CPU seconds by bytes: a state is serialized, written to shared memory and announced, held by the server,
    requested, mapped, verified and copied. All ends are in this process, whose total CPU time is measured."""
    seen: dict[int, list[float]] = defaultdict(list)
    one, other = socket.socketpair()
    with closing(Arena()) as worker, closing(Arena()) as front, closing(Reader()) as keeps, closing(Reader()) as reader:
        link, messages = Link(one), Link(other).messages()
        for number in range(-1, _TIMES):
            for size in _SIZES:
                features = torch.zeros(size // 4096, 1024)
                rows, into = np.arange(len(features)), torch.empty_like(features)
                payload: Any = EncodedPayload(Encoded(rows, rows, features))
                begun = time.process_time()
                ticket = worker.write(PAYLOADS.pack(payload))
                link.send([Moved("", "", None, _plain(), ticket, stays=False)])
                [moved] = next(messages)
                held = front.put(keeps.take(moved.parcel))
                link.send(("take", ([Order("", "", None, moved.handover, held)],)))
                _name, [[order]] = next(messages)
                into.copy_(PAYLOADS.decode(reader.read(order.parcel)).encoded.features)
                if number >= 0:
                    seen[size].append(time.process_time() - begun)
                front.drop(held)
                worker.drop(ticket)
        link.close()
    other.close()
    return fit([Sample(float(size), 0.0, statistics.median(each)) for size, each in seen.items()])


def _plain() -> Handover:
    message = Message("user", (TextPart("What is left of the circle?"),))
    return Handover(Request(id="", model="", messages=(message,)), Stage.ENCODED, None)
