"""What keeps a run whole whatever happens around it: its lock, signals, a full disk, a changed recipe.

`interruption.py` turns signals into a request to stop; `lock.py` keeps a second process out; `recipe.py` sees
whether a run still has the recipe it began with; `disk.py` says what to do where nothing can be written.
"""
