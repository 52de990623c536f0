"""Tensors kept under the hash of all that they depend on: in memory, and in a folder that processes share."""
