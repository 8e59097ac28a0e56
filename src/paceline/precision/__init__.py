"""Low precision for rollouts: FP8 weights, keys and values that follow the learner's policy."""
