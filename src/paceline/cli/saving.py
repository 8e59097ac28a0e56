"""The folder of `paceline rollout --save`: whether samples can go there, before any are generated."""

import tempfile
from pathlib import Path

from paceline.config import ConfigError


def prepare_samples_folder(save: Path) -> None:
    """Makes the folder; raises ConfigError where it cannot be written to, or holds saved steps already."""
    try:
        save.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=save).close()
    except OSError as error:
        raise ConfigError(f"--save {save}: {error}; choose a folder that can be written to") from None
    earlier = sorted(file.name for file in save.glob("step_*.jsonl"))
    if earlier:
        more = f" and {len(earlier) - 1} more" if len(earlier) > 1 else ""
        raise ConfigError(
            f"--save {save}: it holds {earlier[0]}{more} of an earlier save, and `train --replay` would mix "
            "them; remove those, or choose another folder"
        )
