"""What every section of a recipe is: typed, closed to unknown keys, and unchangeable once read."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ConfigError(ValueError):
    """A recipe that cannot be used; the message names the key, the value and the way out."""
