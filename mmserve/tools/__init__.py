"""Tool calls in the text of a model: how they are written, the grammar that admits only valid ones, their reading."""
