"""Rewards of responses: built-in verifiers and the user's functions, isolated so that they cannot stop a run.

`functions.py` loads a function; `pool.py` and `worker.py` run it in other processes, `coroutines.py` in an
event loop; `scoring.py` adds up what comes back. Every call has a time limit, which the recipe sets for each
reward: `task.rewards[].time_limit` (config/task.py).
"""
