"""The state of one constrained request in the decode loop."""
