"""Video sessions: frames in at any time, questions about what was seen, within bounds of memory and of position."""
