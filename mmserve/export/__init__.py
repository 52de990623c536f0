"""Models written in the formats of other programs."""
