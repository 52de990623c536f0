"""Measurement of decode policies on a model's own prompts: ``mmserve tune``."""
