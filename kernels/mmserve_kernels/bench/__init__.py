"""Benchmarks of the ops, a module each, whose ``cases`` yields the measurements and the checks of their results."""

#: Ops with a benchmark, in the module of that name.
OPS = ("attention_scores", "cached_attention", "commit_scores", "kv_quant", "rope_scatter", "sparse_attention")
