"""What would it give me? A performance model of rollouts and an event simulation of RL steps on it.

    hardware (profiles) ─┐
    model shape ─────────┼─▶ step_cost ──▶ replica ──▶ pipeline ──▶ outcome ──▶ report, HTML
    engine, precision ───┘    (operators)   (a batch     (RL steps: sync
    workload, speculation ──────────────▶   over time)    to async)

Numbers only: numpy, no torch, except in `measure.py`, which times this machine's kernels for `calibrate`.
Knows nothing of the engine's internals; what it says about the engine was measured from outside
(`measurements/`).
"""
