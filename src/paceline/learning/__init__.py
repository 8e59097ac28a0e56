"""Learning from completions: advantages, losses, the packed forward pass, the optimiser, checkpoints.

`algorithms/` documents how to add an algorithm.
"""
