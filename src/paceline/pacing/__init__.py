"""Which strategy to run now: which drafter proposes how many tokens, if any.

    moment ──▶ choose ──▶ decision ──▶ the backend's step ──▶ observation ──▶ observe, some steps later

The package knows numbers about steps, never the engine: any backend that can say how many rows run and how
long a step took can be paced. Choices follow from the moments and observations handed in, in their order, and
one seed; no clock is read.

    strategy.py        the vocabulary: strategies, moments, decisions, observations, the `Pacer` protocol
    settings.py        what a run asks for, and every tuned number with its origin
    adaptive.py        the adaptive pacer, which puts the following parts together
    blocks.py          observations of one decision, summed up
    cost.py            seconds: verifying (verify_times.py, time_estimate.py), drafting, catching up
    acceptance.py      tokens that a proposal gains, by depth and situation (situation.py)
    rates.py           tokens per second that follow from both
    guard.py           has a drafter measured slower than plain decoding?
    trials.py          what to try next and what it may cost; waits after failures (drafter_record.py)
    store.py, trace.py the files of a run directory
"""
