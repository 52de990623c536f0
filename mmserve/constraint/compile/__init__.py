"""Schemas, regular expressions and grammars of requests as grammars for llguidance, compiled in child processes."""
