"""Ask about what a camera sees: ``python samples/camera_qa.py /dev/video0 --format v4l2 [--server HOST:PORT]``.

The source is anything that PyAV opens: a device, a file, or a network address. A network address is opened only if its
host is named by ``--allow``, and no playlist is followed, since that could name other hosts; FFmpeg follows redirects
of HTTP. One picture a second is pushed; type a question and press return.
"""

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import av
from PIL import Image

from mmserve.client import Client, ConfigError, MMServeError, VideoSession

#: What FFmpeg may use to reach a source, by its scheme.
PROTOCOLS = {
    "http": "http,tcp",
    "https": "https,tls,tcp",
    "rtsp": "rtsp,rtp,udp,tcp",
    "rtmp": "rtmp,tcp",
    "tcp": "tcp",
    "udp": "udp",
}
#: Formats that refer to nothing else, unlike playlists.
FORMATS = "mov,mp4,matroska,webm,mpegts,flv,h264,hevc,mpjpeg,rtsp,rtp,sdp"


def main(arguments: list[str] | None = None) -> int:
    """Watch, ask, answer."""
    parser = argparse.ArgumentParser(description="Ask about what a camera sees.")
    parser.add_argument("source", help="a device, a file or a network address")
    parser.add_argument("--format", help="how PyAV reads it: v4l2, avfoundation, dshow ...")
    parser.add_argument("--allow", action="append", default=[], metavar="HOST", help="network host that may be opened")
    parser.add_argument("--rate", type=float, default=1.0, help="pictures a second (default: 1)")
    parser.add_argument("--server", help="HOST:PORT")
    parser.add_argument("--model", help="a model that takes sessions")
    asked = parser.parse_args(arguments)
    try:
        options = checked(asked.source, asked.allow)
    except ValueError as error:
        parser.error(str(error))
    with Client(asked.server) as client, client.video_session(model=asked.model, overload="drop_oldest") as session:
        over = threading.Event()
        camera = threading.Thread(target=_watch, args=(session, asked, options, over), daemon=True)
        camera.start()
        for line in sys.stdin:
            if text := line.strip():
                try:
                    print(f"{text} -> {session.ask(text, max_new_tokens=32).text}", flush=True)
                except MMServeError as error:
                    print(f"{text} -> {error}", file=sys.stderr)
        over.set()
        camera.join(5)
    return 0


def checked(source: str, allowed: Sequence[str]) -> dict[str, str]:
    """FFmpeg's options for a source; raises ``ValueError`` for a network address that is not allowed."""
    scheme, separator, _ = source.partition("://")
    if not separator or scheme == "file":
        if ":" in source.split("/")[0][2:]:  # "concat:", "subfile:" and others; "C:" is a drive
            raise ValueError(f"{source!r} is neither a device, nor a file, nor a network address")
        return {"protocol_whitelist": "file"}
    if scheme not in PROTOCOLS:
        raise ValueError(f"{scheme} is not one of {', '.join(PROTOCOLS)}")
    host = urlsplit(source).hostname or ""
    if host not in allowed:
        raise ValueError(f"the host {host!r} is not allowed; name it with --allow {host}")
    return {"protocol_whitelist": PROTOCOLS[scheme], "format_whitelist": FORMATS}


def pictures(source: str, kind: str | None, options: dict[str, str], rate: float) -> Iterator[Image.Image]:
    """So many pictures a second of a source, by the clock."""
    due = time.monotonic()
    container: Any = av.open(source, format=kind, options=options)
    with contextlib.closing(container):
        for frame in container.decode(video=0):
            if time.monotonic() >= due:
                due += 1 / rate
                yield frame.to_image()


def _watch(session: VideoSession, asked: argparse.Namespace, options: dict[str, str], over: threading.Event) -> None:
    try:
        for picture in pictures(asked.source, asked.format, options, asked.rate):
            if over.is_set():
                return
            session.push(picture)
    except (MMServeError, av.error.FFmpegError) as error:
        print(f"the camera stopped: {error}", file=sys.stderr)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, MMServeError) as error:
        sys.exit(str(error))
