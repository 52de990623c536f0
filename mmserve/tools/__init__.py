"""Tool calls in a model's text: their formats, the grammar that accepts only valid ones, and their parser."""
