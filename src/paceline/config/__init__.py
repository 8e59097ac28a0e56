"""The recipe: typed settings with defaults, one class per section of the YAML file.

The description of each field documents its key. This package imports no torch, so that `paceline --help` is
fast.
"""

from paceline.config.cluster import ClusterConfig
from paceline.config.correction import CORRECTION_PRESETS, CorrectionConfig
from paceline.config.distill import DistillConfig
from paceline.config.learning import ALGORITHM_DEFAULTS, LearningConfig
from paceline.config.notes import learning_notes, rollout_notes, signal_notes
from paceline.config.online import OnlineDrafterConfig
from paceline.config.policy import LoraConfig, PolicyConfig
from paceline.config.reading import (
    RECIPES,
    dump_config,
    load_config,
    parse_config,
    refuse_mistyped_keys,
    shipped_recipes,
)
from paceline.config.recipe import (
    RESUME_MAY_CHANGE,
    CheckpointConfig,
    Config,
    EvalConfig,
    ReportConfig,
    RunConfig,
    changed_keys,
    flat_keys,
)
from paceline.config.rollout import (
    FRESH,
    RolloutConfig,
    SentinelConfig,
    SpeculationConfig,
)
from paceline.config.section import ConfigError, Section
from paceline.config.sft import SftConfig
from paceline.config.task import DataConfig, RewardConfig, TaskConfig, TurnsConfig
from paceline.config.vllm import VllmConfig

__all__ = [
    "ALGORITHM_DEFAULTS",
    "CORRECTION_PRESETS",
    "FRESH",
    "RECIPES",
    "RESUME_MAY_CHANGE",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "CorrectionConfig",
    "DataConfig",
    "DistillConfig",
    "EvalConfig",
    "LearningConfig",
    "LoraConfig",
    "OnlineDrafterConfig",
    "PolicyConfig",
    "ReportConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "SentinelConfig",
    "SftConfig",
    "SpeculationConfig",
    "TaskConfig",
    "TurnsConfig",
    "VllmConfig",
    "changed_keys",
    "dump_config",
    "flat_keys",
    "learning_notes",
    "load_config",
    "parse_config",
    "refuse_mistyped_keys",
    "rollout_notes",
    "shipped_recipes",
    "signal_notes",
]
