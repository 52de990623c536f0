"""Planning of a cluster: stage costs, a simulation of workers, and a search for the layout with the highest goodput.

Only ``measure`` and ``served`` import torch: they run the stages of a model. The rest is pure computation.
"""
