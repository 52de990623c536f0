"""Standing questions about a video, to a CSV: ``python samples/alerts.py FILM.mp4 "Is there a red circle?" ...``.

Prints a line each time that the answer to one of the questions turns to yes, or back.
"""

import argparse
import csv
import sys
import threading
from functools import partial
from pathlib import Path

from mmserve.client import Alert, Client


def main(arguments: list[str] | None = None) -> int:
    """Push the film, write its alerts."""
    parser = argparse.ArgumentParser(description="Standing questions about a video, to a CSV.")
    parser.add_argument("film", type=Path)
    parser.add_argument("question", nargs="+", help="answered by yes or no, about each frame")
    parser.add_argument("--server", help="HOST:PORT")
    parser.add_argument("--model", help="a model that takes sessions")
    parser.add_argument("--rate", type=float, default=1.0, help="frames a second that are looked at (default: 1)")
    parser.add_argument("--on", type=float, help="probability at which an answer turns to yes")
    parser.add_argument("--off", type=float, help="probability at which it turns back")
    parser.add_argument("--realtime", action="store_true", help="push the file as fast as it plays")
    asked = parser.parse_args(arguments)
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
    sys.exit(main())
