"""`paceline export`: a run's policy as a Hugging Face folder.

With LoRA that is the merged model; its adapters go along as `adapter/`, a PEFT folder.
"""

import shutil
from pathlib import Path

from paceline.learning.checkpoint import newest_checkpoint
from paceline.policy.config import read_config
from paceline.policy.huggingface import DTYPES, load_policy, save_policy


def export_policy(checkpoint: Path, out: Path, dtype: str) -> Path:
    """Writes the policy of a run directory (its newest checkpoint), a checkpoint or a policy folder to `out`.

    Returns the folder that the policy was read from.
    """
    if dtype and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
    source = checkpoint
    if (checkpoint / "checkpoints").is_dir():
        newest = newest_checkpoint(checkpoint / "checkpoints", set_aside=False)  # it may be training
        if newest is None:
            raise FileNotFoundError(f"{checkpoint} has no checkpoint yet")
        source = newest
    adapter = source / "adapter"
    if (source / "policy").is_dir():
        source = source / "policy"
    read_config(source)
    policy = load_policy(source, DTYPES[dtype or "float32"])
    save_policy(policy, out, tokenizer_from=source)
    if adapter.is_dir():
        shutil.copytree(adapter, out / "adapter", dirs_exist_ok=True)
    return source
