"""States as objects in Ray's object store, which transfers them between hosts."""

from __future__ import annotations

from typing import Any

from mmserve.errors import TransferError

#: Timeout (seconds) for an object from another host.
_PATIENCE = 30.0


def stored(data: Any) -> Any:
    """Puts ``data``, a buffer of bytes, into the store. Returns the reference."""
    import numpy as np
    import ray

    return ray.put(np.frombuffer(data, np.uint8))


def fetched(reference: Any) -> memoryview:
    """The bytes of a reference; raises ``TransferError`` if they are lost."""
    import ray

    try:
        return memoryview(ray.get(reference, timeout=_PATIENCE))
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise TransferError(f"a payload is lost: {type(error).__name__}") from error
