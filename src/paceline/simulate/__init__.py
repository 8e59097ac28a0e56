"""What would it give me? A performance model of rollouts and an event simulation of RL steps on it.

    hardware (profiles) ─┐
    model shape ─────────┼─▶ step_cost ──▶ replica ──▶ pipeline ──▶ outcome ──▶ report
    engine, precision ───┘    (operators)   (a batch     (RL steps: sync
    workload, speculation ──────────────▶   over time)    to async)

`question.py` reads what is asked, `from_run.py` starts from a measured run. The profiles'
figures are measured, fitted and validated by `benchmarks/simulator/`.
"""
