"""What would it give me? A performance model of rollouts and an event simulation of RL steps on it.

    hardware (profiles) ─┐
    model shape ─────────┼─▶ step_cost ──▶ replica ──▶ pipeline ──▶ outcome ──▶ report, HTML
    engine, precision ───┘    (operators)   (a batch     (RL steps: sync
    workload, speculation ──────────────▶   over time)    to async)

Simulating needs numpy and no torch. What it says about engines was measured (`measurements/`), and measuring
does run them: `measure.py` times the native engine's kernels, `measure_steps.py` its steps and rollouts.
"""
