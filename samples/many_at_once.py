"""Ask many questions at once with asyncio: ``python samples/many_at_once.py [HOST:PORT]``.

The server batches them; each answer is the same as if it had been asked alone.
"""

import asyncio
import sys

from mmserve.client import AsyncClient, ConfigError, MMServeError
from mmserve.reference.evaluate import item, media_files
from mmserve.reference.tasks import correct


async def main(target: str) -> None:
    """Ask 32 questions about 32 pictures and clips together."""
    tasks = ("count", "color", "position", "when")
    asked = [item(tasks[i % len(tasks)], i, seed=11) for i in range(32)]
    async with AsyncClient(target, timeout=300) as client:
        results = await asyncio.gather(
            *(client.generate(q.text, **media_files(q.task, thing), max_new_tokens=16) for thing, q in asked)
        )
    right = sum(correct(q, r.text) for (_thing, q), r in zip(asked, results, strict=True))
    print(f"{right} of {len(asked)} right")


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:50051"))
    except (ConfigError, MMServeError) as error:
        sys.exit(str(error))
