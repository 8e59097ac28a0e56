"""What every section of a recipe is: typed, closed to unknown keys, and unchangeable once read."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    def is_default(self, key: str) -> bool:
        """Whether a key applies is judged by its value: a saved recipe spells out every key."""
        return getattr(self, key) == type(self).model_fields[key].get_default(call_default_factory=True)


class ConfigError(ValueError):
    """A recipe that cannot be used; the message names the key, the value and the way out."""
