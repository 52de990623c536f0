"""Optional features of a request in decode, one module or package each; ``base.py`` is the protocol."""
