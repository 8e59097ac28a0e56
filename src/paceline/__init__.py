"""Paceline: RL post-training with speculative rollouts that leave what the policy samples unchanged."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paceline.api import load, train
    from paceline.config import Config, load_config

__all__ = ["Config", "load", "load_config", "train"]


def __getattr__(name: str) -> Any:
    """Imports on first use, so that `import paceline` needs no torch."""
    if name in ("Config", "load_config"):
        from paceline import config

        return getattr(config, name)
    if name in ("load", "train"):
        from paceline import api

        return getattr(api, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
