"""vLLM answering prompts given as lines of JSON: run by another interpreter, which needs vLLM and not mmserve.

``python vllm_peer.py MODEL DTYPE MOST_TOKENS``; it prints ``{"ready": version}``, then for each line ``{"prompts":
[[ids]], "new_tokens": n}`` a line ``{"seconds": s, "tokens": [[ids]]}``.
"""

import json
import os
import sys
import time


def main() -> None:
    """Run until stdin is closed."""
    model, dtype, most = sys.argv[1:4]
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the library logs to stdout
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }.items():
        os.environ.setdefault(name, value)
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    engine = LLM(model=model, dtype=dtype, max_model_len=int(most), max_num_seqs=64, enable_prefix_caching=False)
    print(json.dumps({"ready": vllm.__version__}), file=out)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=asked["new_tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        begun = time.perf_counter()
        made = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, "tokens": [list(o.outputs[0].token_ids) for o in made]}), file=out)


if __name__ == "__main__":
    main()
