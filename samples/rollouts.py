"""Collect rollouts for reinforcement learning: ``python samples/rollouts.py [HOST:PORT] > rollouts.jsonl``.

Each line is one sampled answer: its prompt, token ids, log-probabilities, and for each token the forward pass that
committed it (the trajectory that TraceRL, arXiv 2509.06949, trains on), with its reward and its advantage within the
group of samples of the same prompt (GRPO, arXiv 2402.03300).
"""

import json
import statistics
import sys

from mmserve.client import Client, ConfigError, MMServeError
from mmserve.reference.evaluate import canvas, item
from mmserve.reference.tasks import correct

PROMPTS, SAMPLES = 4, 8


def main(target: str) -> None:
    """Write the samples of a few sums."""
    rewards: list[float] = []
    with Client(target, timeout=300) as client:
        for i in range(PROMPTS):
            question = item("arithmetic", i, seed=5)[1]
            group = client.generate(
                question.text,
                n=SAMPLES,
                temperature=2.0,  # at 1 the bundled model answers nearly all alike
                seed=i,
                quality="exact",
                tokens=True,
                max_new_tokens=canvas("arithmetic"),
            ).samples
            earned = [float(correct(question, each.text)) for each in group]
            mean, deviation = statistics.fmean(earned), statistics.pstdev(earned)
            for sample, reward in zip(group, earned, strict=True):
                line = {
                    "prompt": question.text,
                    "answer": sample.text,
                    "tokens": [token.id for token in sample.tokens],
                    "log_probabilities": [token.log_probability for token in sample.tokens],
                    "steps": [token.step for token in sample.tokens],
                    "reward": reward,
                    "advantage": (reward - mean) / deviation if deviation else 0.0,
                }
                print(json.dumps(line))
            rewards += earned
    print(f"mean reward {statistics.fmean(rewards):.2f} of {len(rewards)} samples", file=sys.stderr)


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "localhost:50051")
    except (ConfigError, MMServeError) as error:
        sys.exit(str(error))
