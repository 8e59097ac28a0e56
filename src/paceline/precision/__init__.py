"""Low precision for rollouts: FP8 weights that follow the learner's, FP8 keys and values with scales that
follow the policy.
"""
