"""Chooses the strategy of each step: which drafter proposes how many tokens, if any.

    moment ──▶ choose ──▶ decision ──▶ the backend's step ──▶ observation ──▶ observe, some steps later

The package works on numbers about steps, never on the engine: any backend that reports how many rows run and
how long a step took can be paced. Choices follow from the moments and observations passed in, in their order,
and one seed; no clock is read.

    strategy.py        the vocabulary: strategies, moments, decisions, observations, the `Pacer` protocol
    settings.py        a run's requirements, and every tuned number with its origin
    adaptive.py        the adaptive pacer, which combines the following parts
    blocks.py          observations of one decision, summarised
    cost.py            seconds: verifying (verify_times.py, time_estimate.py), drafting, catching up
    acceptance.py      tokens that a proposal gains, by depth and situation (situation.py)
    rates.py           tokens per second, from both
    guard.py           has a drafter measured slower than plain decoding?
    trials.py          what to try next and its budget; waits after failures (drafter_record.py)
    store.py, trace.py the files of a run directory
"""
