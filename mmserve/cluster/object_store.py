"""States as objects of Ray's store, which carries them between hosts."""

from __future__ import annotations

from typing import Any

from mmserve.errors import TransferError

#: Seconds for an object to come from another host.
_PATIENCE = 30.0


def stored(data: Any) -> Any:
    """A reference to ``data``, any buffer of bytes, in the store."""
    import numpy as np
    import ray

    return ray.put(np.frombuffer(data, np.uint8))


def fetched(reference: Any) -> memoryview:
    """The bytes that a reference is for; ``TransferError`` where they are lost."""
    import ray

    try:
        return memoryview(ray.get(reference, timeout=_PATIENCE))
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise TransferError(f"a payload is lost: {type(error).__name__}") from error
