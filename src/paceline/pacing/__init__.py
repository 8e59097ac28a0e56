"""Which strategy to run now.

    moment (who runs) ──▶ choose ──▶ decision ──▶ the backend's step ──▶ observation ──▶ observe, some steps later

Knows numbers about steps, never the engine: any backend that can say who runs and how long a step took can be
paced. What it chooses is a function of the moments and observations it was given, in their order, and of one
seed; it reads no clock.
"""
