"""What a request may have beside the plain decode step, a module or package each; ``base.py`` is the protocol."""
