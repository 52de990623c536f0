"""A session with a model of Qwen-VL's layout, over real sockets and through the SDK."""

from __future__ import annotations

from pathlib import Path

import pytest
from clips import clip
from qwen_vl_checkpoints import KINDS, Qwen
from video_client import picture, sdk, video_server

from mmserve.errors import Unimplemented


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_with_temporal_patches(kind: str, tmp_path: Path) -> None:
    with video_server(model=Qwen(tmp_path, kind).load()) as (address, _), sdk(address) as client:
        assert client.describe().sessions
        with client.video_session(budget=200) as session:
            for number in range(3):
                session.push(picture(number, (16, 16)), float(number))
            question = session.stream("what is it?", max_new_tokens=6)
            question.result()
            assert question.asked is not None
            assert (question.asked.frames, question.asked.begin, question.asked.end) == (3, 0.0, 2.0)
            session.push_segment(clip(frames=20, rate=10, gop=20), 3.0)
            past = session.stream("what was it?", scope=(0.0, 1.0), max_new_tokens=6)
            past.result()
            assert past.asked is not None and past.asked.frames == 2
            with pytest.raises(Unimplemented, match="standing questions"):
                session.watch("is it red?").next(20)
            statistics = session.statistics()
            assert (statistics.frames_taken, statistics.pushes_failed, statistics.questions) == (5, 0, 2)
