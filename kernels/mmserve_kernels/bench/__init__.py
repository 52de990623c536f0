"""Benchmarks of the ops, a module each, whose ``cases`` give what is measured and what a right result is."""

#: Ops that are measured, each by the module of its name.
OPS = ("attention_scores", "cached_attention", "commit_scores", "kv_quant", "rope_scatter", "sparse_attention")
