"""Stages on the workers of a Ray cluster: placement, routing, recovery and role switching."""
