"""The base class of a recipe's sections: typed, closed to unknown keys, and frozen once read."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    def is_default(self, key: str) -> bool:
        """Returns whether a key has its default value, given or not: a saved recipe spells out every key."""
        default = type(self).model_fields[key].get_default(call_default_factory=True)
        return bool(getattr(self, key) == default)

    def refuse_unused(self, section: str, keys: tuple[str, ...], why: str) -> None:
        """Raises where one of these keys has a value that another key makes useless; `why` says which."""
        for key in keys:
            if not self.is_default(key):
                default = type(self).model_fields[key].get_default(call_default_factory=True)
                named, value = f"{section}.{key}", getattr(self, key)
                raise ValueError(
                    f"{named} = {value!r} does not apply: {why}, or leave it out ({named}={default})"
                )


class ConfigError(ValueError):
    """The error for a recipe that cannot be used; its message names the key, the value and the way out."""
