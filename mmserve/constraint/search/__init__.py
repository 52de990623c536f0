"""Valid paths through a canvas: tokens as bytes, ways to the end of a text, and the search for the best path."""
