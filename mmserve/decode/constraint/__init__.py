"""Constrained decoding: matchers over a grammar, and the witness that keeps every canvas completable."""
