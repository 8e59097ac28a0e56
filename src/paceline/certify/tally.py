"""Counts verdicts by setting and by the token's place in its step, and turns the counts into checks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.certify.certificate import Check
from paceline.certify.judge import Step, Verdicts
from paceline.certify.power import Power, found_by_equality
from paceline.certify.requests import describe, drawn_label
from paceline.certify.statistics import ROUNDING_MARGIN, UNSEEN, poisson_tail
from paceline.types import Completion, SamplingParams

# Choices other than the most likely token that a place needs before its power is stated.
MIN_RANDOM = 20

# (largest, mean) difference allowed between a backend's logprob and the oracle's, by the width of the type.
LOGPROB_LIMITS = {"float64": (1e-8, 1e-9), "float32": (1e-3, 1e-5), "bfloat16": (1.0, 0.03)}


@dataclass
class Count:
    """Verdicts on the tokens of one kind."""

    tokens: int = 0
    decided: int = 0
    random: int = 0  # decided ones that are not the most likely token
    wrong: list[str] = field(default_factory=list)  # each as a line for the reader

    def add(self, verdicts: Verdicts, place: int, completion: Completion) -> None:
        self.tokens += 1
        self.decided += verdicts.decided[place]
        self.random += verdicts.decided[place] and verdicts.random[place]
        if not verdicts.explained[place]:
            self.wrong.append(
                f"{completion.request.id}, token {place}: {completion.tokens[place]} "
                f"where {verdicts.expected[place]} was to be drawn"
            )

    def check(self, name: str, detail: str, power: tuple[Power, ...], chance: float | None) -> Check:
        """Returns the check that none is wrong; `chance`: how many rounding may explain in a narrow type."""
        if self.wrong:
            detail = (
                f"{len(self.wrong)} of {self.tokens} are not the oracle's choice ({self.wrong[0]}); {detail}"
            )
        if chance is None:
            return Check(name, not self.wrong, detail, power=power)
        return Check(name, None, detail, poisson_tail(len(self.wrong), chance), power=power)


def place_name(depth: int, proposed: int) -> str:
    if not proposed:
        return "plain"
    if depth == 0:
        return "first"
    return f"after all {proposed}" if depth >= proposed else f"after {depth}"


class Tally:
    """The verdicts of all runs of a subject."""

    def __init__(self, copies: int, proposed: int, listed: Iterable[SamplingParams]) -> None:
        """Takes the number of copies in a narrow type, and of tokens that steps usually propose.

        What was sampled with settings that are not `listed` was drawn at random, and is counted by kind.
        """
        self.copies = copies
        self.listed = frozenset(listed)
        self.proposed = proposed
        self.counts: dict[tuple[str, int, int], Count] = {}
        self.logprob_errors: list[float] = []
        self.top_errors: list[float] = []
        self.copies_unexplained = 0
        self.tokens = 0

    def add(
        self,
        completions: Sequence[Completion],
        verdicts: Sequence[Verdicts],
        steps: Sequence[list[Step]],
        proposed: int,
    ) -> Count:
        """Counts completions of a run that proposed so many tokens a step; returns the run's own count."""
        whole = Count()
        for completion, own, places in zip(completions, verdicts, steps, strict=True):
            sampling = completion.request.sampling
            setting = SamplingParams(
                sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
            )
            label = describe(setting) if setting in self.listed else drawn_label(setting)
            for place, step in enumerate(places):
                key = label, proposed, min(step.depth, proposed)
                self.counts.setdefault(key, Count()).add(own, place, completion)
                whole.add(own, place, completion)
                self.copies_unexplained += own.copies_unexplained[place]
            self.tokens += len(places)
            self.logprob_errors += own.logprob_error
            self.top_errors += own.top_error
        return whole

    def chance(self, tokens: int) -> float | None:
        """Returns how many wrong ones of so many tokens rounding may explain; None in a wide type."""
        if not self.copies:
            return None
        rate = self.copies_unexplained / max(1, self.copies * self.tokens)
        return UNSEEN + ROUNDING_MARGIN * rate * tokens

    def setting_checks(self) -> list[Check]:
        """Returns a check per setting, with what it would have found at each place."""
        checks = []
        for setting in dict.fromkeys(key[0] for key in self.counts):
            own = {key[1:]: count for key, count in self.counts.items() if key[0] == setting}
            checks.append(self._pooled(setting, setting, own))
        return checks

    def place_checks(self, proposed: int) -> list[Check]:
        """Returns a check per place in steps that proposed so many tokens, over all settings."""
        checks = []
        for depth in range(proposed + 1):
            own = {
                (key[1], key[2], key[0]): count
                for key, count in self.counts.items()
                if key[1:] == (proposed, depth)
            }
            place = place_name(depth, proposed)
            label = f"{place} accepted" if depth else f"{place} of a step"
            check = self._pooled(f"all settings: {label}", "all settings", own)
            checks.append(check)
        return checks

    def _pooled(self, name: str, setting: str, counts: dict[tuple, Count]) -> Check:
        whole = Count()
        power: dict[str, list[int]] = {}
        for key, count in sorted(counts.items(), key=lambda item: item[0][:2]):
            whole.tokens += count.tokens
            whole.decided += count.decided
            whole.random += count.random
            whole.wrong += count.wrong
            usual = key[0] in (0, self.proposed)
            place = place_name(key[1], key[0]) if usual else "other depths"
            power.setdefault(place, []).append(count.decided)
        powers = tuple(
            Power(setting, place, sum(decided), found_by_equality(sum(decided)))
            for place, decided in power.items()
        )
        undecided = whole.tokens - whole.decided
        left_out = f", {undecided} that rounding decides" if undecided else ""
        detail = f"{whole.tokens} tokens, {whole.random} of them not the most likely{left_out}"
        check = whole.check(name, detail, powers, self.chance(whole.tokens))
        if whole.random < MIN_RANDOM and not whole.wrong and setting.split(",")[0] != "T 0":
            few = f"{detail}: too little randomness to say anything"
            return Check(name, None, few, power=powers, promised=False)
        return check

    def logprob_check(self, dtype: str) -> Check:
        """Returns the check of the logprobs that came with the tokens, and of the most likely tokens'."""
        largest_allowed, mean_allowed = LOGPROB_LIMITS[dtype]
        errors = self.logprob_errors + [error for error in self.top_errors if error]
        largest, mean = max(errors), sum(errors) / len(errors)
        detail = (
            f"off by {largest:.1e} at most and {mean:.1e} on average over {len(errors)} "
            f"(allowed: {largest_allowed:g}, {mean_allowed:g})"
        )
        return Check("logprobs", largest <= largest_allowed and mean <= mean_allowed, detail)
