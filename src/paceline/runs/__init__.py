"""Protects a run from the outside: its lock, signals, a full disk, a changed recipe.

`interruption.py` turns signals into a request to stop; `lock.py` keeps a second process out; `recipe.py`
checks that a resumed run still has its recipe; `disk.py` explains what to do when a write fails.
"""
