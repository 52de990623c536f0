"""Alerts of standing questions about a video, as CSV: ``python samples/alerts.py FILM.mp4 "Is there a red circle?"``.

Prints a line each time that the answer to a question changes to yes or back to no.
"""

import argparse
import csv
import sys
import threading
from functools import partial
from pathlib import Path

from mmserve.client import Alert, Client, ConfigError, MMServeError


def main(arguments: list[str] | None = None) -> int:
    """Push the video, and write the alerts."""
    parser = argparse.ArgumentParser(description="Write the alerts of standing questions about a video as CSV.")
    parser.add_argument("film", type=Path)
    parser.add_argument("question", nargs="+", help="answered by yes or no, about each frame")
    parser.add_argument("--server", help="HOST:PORT")
    parser.add_argument("--model", help="a model that takes sessions")
    parser.add_argument("--rate", type=float, default=1.0, help="frames a second that the model sees (default: 1)")
    parser.add_argument("--on", type=float, help="probability at which an answer becomes yes")
    parser.add_argument("--off", type=float, help="probability at which it becomes no again")
    parser.add_argument("--realtime", action="store_true", help="push the file in real time")
    asked = parser.parse_args(arguments)
    if not asked.film.is_file():
        parser.error(f"there is no file {asked.film}")
    table, lock = csv.writer(sys.stdout), threading.Lock()
    table.writerow(["seconds", "question", "true", "probability", "mass"])

    def write(question: str, alert: Alert) -> None:
        with lock:
            row = [f"{alert.seconds:.3f}", question, int(alert.active), f"{alert.probability:.4f}", f"{alert.mass:.4f}"]
            table.writerow(row)
            sys.stdout.flush()

    with Client(asked.server) as client, client.video_session(model=asked.model, rate=asked.rate) as session:
        for question in asked.question:
            session.watch(question, on=asked.on, off=asked.off, callback=partial(write, question))
        session.push_file(asked.film, realtime=asked.realtime, segment_seconds=1.0)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, MMServeError) as error:
        sys.exit(str(error))
