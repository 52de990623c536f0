"""References to media files: the id of an upload, which is the hash of its bytes, or a URL."""

from __future__ import annotations

import hashlib
import re

_MEDIA_ID = re.compile(r"sha256:[0-9a-f]{64}")


def media_id_of(data: bytes) -> str:
    """The media id of ``data``: ``sha256:`` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def is_media_id(value: str) -> bool:
    """Whether ``value`` has the form of a media id."""
    return _MEDIA_ID.fullmatch(value) is not None


def is_url(value: str) -> bool:
    """Whether ``value`` begins with http:// or https://."""
    return value[:8].lower().startswith(("http://", "https://"))
