"""Prediction against measurement: what `docs/simulator.md` is made of. Nothing here is used by a
simulation.
"""
