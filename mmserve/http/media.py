"""Media in bodies: ``data:`` URLs, media ids, and URLs, which ``rpc/fetching.py`` downloads."""

from __future__ import annotations

import base64
from collections.abc import Collection
from typing import Any

from mmserve.core.media_id import is_url
from mmserve.errors import InvalidArgument
from mmserve.http.fields import Fields
from mmserve.v1 import generation_pb2 as pb

#: Pattern of the media ids of ``mmserve.v1.MediaService``, which may replace a URL.
MEDIA_ID = "sha256:"
#: Values of OpenAI's level of detail for images.
DETAILS = ("auto", "low", "high", "original")


def image(url: str, path: str) -> pb.ContentPart:
    """An image by its URL or media id; ``path``: the field, for errors."""
    if is_url(url):
        return pb.ContentPart(image=pb.Image(url=url))
    if url.startswith(MEDIA_ID):
        return pb.ContentPart(image=pb.Image(media_id=url))
    return pb.ContentPart(image=pb.Image(data=_data(url, "image/", path)))


def video(url: str, path: str) -> pb.ContentPart:
    """A video by its URL or media id."""
    if is_url(url):
        return pb.ContentPart(video=pb.Video(url=url))
    if url.startswith(MEDIA_ID):
        return pb.ContentPart(video=pb.Video(media_id=url))
    return pb.ContentPart(video=pb.Video(data=_data(url, "video/", path)))


def take_detail(source: Fields) -> None:
    """Read the ``detail`` of an image: a hint without effect; ``mmserve.vision`` sets sizes."""
    if source.take("detail", str, "auto") not in DETAILS:
        raise InvalidArgument.of(source.path("detail"), f"must be one of {', '.join(map(repr, DETAILS))}")


def fields_of(urls: Collection[str], body: Any) -> dict[str, str]:
    """The location of each of ``urls`` in ``body``: the path of the first field with it."""
    found: dict[str, str] = {}
    left: list[tuple[str, Any]] = [("", body)] if urls else []
    while left:  # iterative: a body may be nested as deeply as the parser allows
        path, value = left.pop()
        if isinstance(value, str) and value in urls:
            found.setdefault(value, path)
        elif isinstance(value, dict):
            left += ((f"{path}.{name}" if path else name, each) for name, each in reversed(value.items()))
        elif isinstance(value, list):
            left += ((f"{path}[{i}]", value[i]) for i in reversed(range(len(value))))
    return found


def _data(url: str, kind: str, path: str) -> bytes:
    head, comma, payload = url.partition(",")
    scheme, _, rest = head.partition(":")
    if scheme.lower() != "data" or not comma:
        raise InvalidArgument.of(path, f"must be a data:, http: or https: URL, or a media id, not {scheme[:20]!r}")
    mime, *parameters = rest.split(";")
    if "base64" not in map(str.lower, parameters) or not mime.lower().startswith(kind):
        raise InvalidArgument.of(path, f"must begin with data:{kind}…;base64,")
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError as error:  # also of text that is not ASCII
        raise InvalidArgument.of(path, f"is not valid base64: {error}") from None
