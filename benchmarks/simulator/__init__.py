"""Measures a GPU, fits the profile that `paceline simulate` reads, and judges the simulator's predictions.

    measure ──points──▶ fit ──▶ calibrate     a profile of the machine
    measure_steps ──points──▶ validate        predictions beside measured and published figures

Each script runs from the repository's root: `python -m benchmarks.simulator.calibrate machine.json`.
"""
