"""The recipe's keys of `rollout` that set when a step may learn: its mode, lag and prompts in flight."""

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.section import MOST_PROBLEMS, MOST_SAMPLES, Section

# The modes in which each key applies.
MODE_KEYS: dict[str, tuple[str, ...]] = {
    "max_lag": ("partial", "async"),
    "on_stale": ("partial", "async"),
    "on_update": ("partial", "async"),
    "prompts_in_flight": ("partial", "oversample", "async"),
    "stragglers": ("oversample",),
}

# Prompts that `oversample` samples for each one that a step needs, by default.
OVERSAMPLED = 1.5


class ModeKeys(Section):
    """When a step ends and what happens to unfinished groups (docs/modes.md); part of `rollout`."""

    mode: Literal["sync", "partial", "oversample", "async"] = Field(
        "sync",
        description="sync: a step waits for all its responses; partial: for enough groups, the others "
        "continue after the update; oversample: more prompts than needed, stragglers are given up; "
        "async: generation in a process of its own never waits for learning",
    )
    max_lag: int = Field(
        1,
        ge=0,
        le=1000,
        description="partial, async: weight versions that a group may be behind when learned from",
    )
    on_stale: Literal["wait", "drop"] = Field(
        "wait",
        description="partial, async: a step waits for groups that would exceed max_lag, or they are dropped "
        "and counted",
    )
    on_update: Literal["recompute", "keep"] = Field(
        "recompute",
        description="partial, async: new weights recompute the caches of what is under way (exact), or keep "
        "them (cheaper; keys and values of older weights)",
    )
    prompts_in_flight: int = Field(
        0,
        ge=0,
        le=MOST_PROBLEMS,
        description="prompts under way or waiting to be learned from; 0: (max_lag + 1) x prompts_per_step, "
        "in mode oversample 1.5 x",
    )
    stragglers: Literal["abort", "carry"] = Field(
        "abort",
        description="oversample: prompts that were not finished in time are dropped, or asked again in the "
        "next step",
    )
    prompts_per_step: int = Field(
        16, ge=1, le=MOST_SAMPLES, description="prompts, and thus groups, of a step"
    )

    @property
    def in_flight(self) -> int:
        """The limit of prompts under way or waiting to be learned from."""
        if self.mode == "sync":
            return self.prompts_per_step
        if self.prompts_in_flight:
            return self.prompts_in_flight
        if self.mode == "oversample":
            return -int(-OVERSAMPLED * self.prompts_per_step // 1)
        return (self.max_lag + 1) * self.prompts_per_step

    @model_validator(mode="after")
    def _mode_keys_apply(self) -> "ModeKeys":
        for key, modes in MODE_KEYS.items():
            if self.mode not in modes and not self.is_default(key):
                raise ValueError(
                    f"rollout.{key} = {getattr(self, key)!r} does not apply to rollout.mode = {self.mode!r}, "
                    f"only to {', '.join(modes)}; change that, or leave it out "
                    f"(rollout.{key}={type(self).model_fields[key].default})"
                )
        return self

    @model_validator(mode="after")
    def _in_flight_fits(self) -> "ModeKeys":
        count = self.prompts_in_flight
        if count and count < self.prompts_per_step:
            raise ValueError(
                f"rollout.prompts_in_flight = {count} must be at least rollout.prompts_per_step = "
                f"{self.prompts_per_step}: a step learns from that many groups"
            )
        most = (self.max_lag + 1) * self.prompts_per_step
        if self.mode in ("partial", "async") and self.on_stale == "wait" and count > most:
            raise ValueError(
                f"rollout.prompts_in_flight = {count}: with rollout.max_lag = {self.max_lag} and on_stale = "
                f"'wait' at most (max_lag + 1) x prompts_per_step = {most} can be learned from in time; "
                "lower it, raise max_lag, or use rollout.on_stale=drop"
            )
        return self
