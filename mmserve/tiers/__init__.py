"""Content-addressed caches of tensors, keyed by the hash of all inputs: in memory, and in a folder shared by
processes."""
