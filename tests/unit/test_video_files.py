"""Video files as the client cuts them."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest

from mmserve.client.video_files import file_segments
from mmserve.errors import InvalidArgument


def test_a_file_whose_frames_have_no_times_is_refused() -> None:
    """Not pushed as nothing at all."""
    file = io.BytesIO()
    with av.open(file, "w", format="h264") as out:
        stream = out.add_stream("libx264", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for _ in range(4):
            frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    file.seek(0)
    with pytest.raises(InvalidArgument, match="no frame with a time"):
        list(file_segments(file))
