"""Conversion between protobuf messages and plain data of ``mmserve.core``, shared by server and client."""
