"""Ask many questions at once with asyncio: ``python samples/many_at_once.py [HOST:PORT]``.

The server batches them; each answer is the same as if it had been asked alone.
"""

import asyncio
import random
import sys

from mmserve.client import AsyncClient
from mmserve.reference.scenes import SHORT_TASKS, correct, sample


async def main(target: str) -> None:
    """Ask 32 questions about 32 scenes together."""
    rng = random.Random(11)
    asked = [sample(rng, SHORT_TASKS[i % len(SHORT_TASKS)]) for i in range(32)]
    async with AsyncClient(target) as client:
        results = await asyncio.gather(
            *(client.generate(q.text, images=[scene.png()], max_new_tokens=16) for scene, q in asked)
        )
    right = sum(correct(q, r.text) for (_scene, q), r in zip(asked, results, strict=True))
    print(f"{right} of {len(asked)} right")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:50051"))
