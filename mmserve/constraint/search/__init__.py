"""Search for valid paths through a canvas: the vocabulary, completions, and the search for the best path."""
