"""Prediction against measurement: what `docs/simulator.md` is made of. No simulation uses it."""
