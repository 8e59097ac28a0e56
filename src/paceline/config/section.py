"""The base class of a recipe's sections: typed, closed to unknown keys, and frozen once read."""

from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

from paceline.types import MIN_TEMPERATURE

# Bounds far beyond any run. A larger value is a typo, and would not fit in memory, or never end.
MOST_STEPS = 1_000_000_000
MOST_PROBLEMS = 10_000_000  # they are all in memory
MOST_SAMPLES = 1_000_000  # prompts of a step, or responses to one prompt
MOST_GB = 100_000.0
MOST_SECONDS = 1_000_000.0  # waiting for a process takes no more than 2^31 ms
MOST_LR = 1e30  # float32 ends at 3e38; a run itself detects what such a rate does


def _sampling_temperature(value: float) -> float:
    if not (value == 0 or value >= MIN_TEMPERATURE):
        raise ValueError(f"must be 0 (the most likely token) or at least {MIN_TEMPERATURE:g}")
    return value


Temperature = Annotated[float, AfterValidator(_sampling_temperature)]


class Section(BaseModel):
    """One section of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_truth_values(cls, value: Any, info: ValidationInfo) -> Any:
        values = value if isinstance(value, list | tuple) else [value]
        kind = cls.model_fields[str(info.field_name)].annotation
        if any(isinstance(one, bool) for one in values) and _takes_numbers(kind):
            raise ValueError("must be a number, and YAML reads true, yes and on as a truth value")
        return value

    def is_default(self, key: str) -> bool:
        """Returns whether a key has its default value, even if given: a saved recipe spells out every key."""
        default = type(self).model_fields[key].get_default(call_default_factory=True)
        return bool(getattr(self, key) == default)

    def refuse_unused(self, section: str, keys: tuple[str, ...], why: str) -> None:
        """Raises ValueError where one of these keys is set but has no effect; `why` names the reason."""
        for key in keys:
            if not self.is_default(key):
                default = type(self).model_fields[key].get_default(call_default_factory=True)
                named, value = f"{section}.{key}", getattr(self, key)
                raise ValueError(
                    f"{named} = {value!r} does not apply: {why}, or leave it out ({named}={default})"
                )


def _takes_numbers(kind: Any) -> bool:
    return kind in (int, float) or any(_takes_numbers(part) for part in get_args(kind))


class ConfigError(ValueError):
    """The error for a recipe that cannot be used; its message names the key, the value and the way out."""
