"""Images that a client pushes are frames of the session's sampler, as those of segments are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from mmserve.encode.sampling import FixedRate, Sampler, Scene, SlowFast
from mmserve.errors import InvalidArgument
from mmserve.video.base import Frame
from mmserve.video.messages import PushImage
from mmserve.video.reading import PushReader

COLORS = {b"r": "red", b"b": "blue"}


class Decoders:
    """Decodes the name of a color as a picture of it; an empty one fails."""

    def map(self, jobs: Any, _check: Any) -> list[Any]:
        return [job(self._decoded) for job in jobs]

    def _decoded(self, file: Any) -> Any:
        if not file.data:
            raise InvalidArgument.of("push_image.data", "is empty")
        return SimpleNamespace(frames=[Image.new("RGB", (32, 32), COLORS[file.data])])


def reading(sampler: Sampler) -> PushReader:
    decoders: Any = Decoders()
    return PushReader(decoders, sampler, 1 << 20, None)


def frames(reader: PushReader, *pushes: tuple[float, bytes]) -> list[Frame]:
    found: list[Frame] = []
    for seconds, data in pushes:
        reader.read(PushImage(data, seconds), found.append, lambda: None)
    return found


def test_every_so_many_images_are_in_detail() -> None:
    reader = reading(SlowFast(FixedRate(1.0), every=3))
    with pytest.raises(InvalidArgument):
        frames(reader, (0.0, b""))  # counts for nothing
    found = frames(reader, *((i + 0.25, b"r") for i in range(7)))
    assert [each.detail for each in found] == [True, False, False, True, False, False, True]
    assert [each.seconds for each in found] == [i + 0.25 for i in range(7)]


def test_the_first_image_of_a_scene_is_in_detail() -> None:
    found = frames(
        reading(Scene(rate=1.0)), *((float(i), data) for i, data in enumerate((b"r", b"r", b"b", b"b", b"r")))
    )
    assert [each.detail for each in found] == [True, False, True, False, True]
