"""Supervised fine-tuning with the learner of RL: `paceline sft`.

`examples.py` makes sequences of the user's rows or of a task's demonstrations, `setup.py` turns a recipe into
the parts of a run, `run.py` is the loop. Packing, passes, optimiser, ranks and checkpoints are `learning/`.
"""
