"""Learning from completions: advantages, losses, the packed forward pass, the optimiser, checkpoints.

`algorithms/` says how to add an algorithm.
"""
