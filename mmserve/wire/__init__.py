"""Protobuf messages to plain data of ``mmserve.core`` and back: what the server and its client share."""
