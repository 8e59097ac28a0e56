"""Learning on several ranks: one process each, FSDP2 shards, the same update as a single process makes.

    join_ranks     group.py         one process becomes one of the ranks: `RankGroup`
    RankLearner    rank_learner.py  the learner that each rank constructs
    sharding.py    which rank holds which rows of which parameter
    adapters.py    LoRA over shards
    export.py      whole tensors again, one at a time, under their Hugging Face names
    saving.py      each rank's files of a checkpoint, and opening one of any number of ranks
    faults.py      which rank is missing when a collective fails

Only this package imports torch.distributed, and only runs on several ranks import this package.
"""
