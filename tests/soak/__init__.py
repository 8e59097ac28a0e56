"""Runs that are killed, signalled, damaged and starved of disk by a random seed: `make soak`.

Each case must end in the weights of an undisturbed run, or in a refusal that says what to do.
"""
