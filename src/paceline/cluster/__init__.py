"""More than one process: replicas behind one queue, learner ranks, their placement, and faults.

Nothing here is imported by a run in one process. Ray only places processes (`placing.py`): they communicate
by the worker's protocol, with Ray or without.
"""
