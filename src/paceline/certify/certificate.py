"""The certificate: every check with its figures, as a table and as JSON."""

import json
from dataclasses import asdict, dataclass, field, replace

from paceline.certify.power import PROBABILITY, Power, percent
from paceline.certify.statistics import holm

# Chance that a sound backend fails any of the statistical checks.
ALPHA = 1e-3


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool | None  # None: decided with the other p-values, or only reported
    detail: str
    p_value: float | None = None  # None: the check is exact, not statistical
    adjusted: float | None = None  # the p-value after Holm's correction
    promised: bool = True  # False: reported, but the backend does not promise it
    power: tuple[Power, ...] = ()  # what it would have found, by the token's place in its step
    part: str = ""  # of the certificate
    left_out: bool = False  # nothing was checked; `detail` is the reason
    raised: bool = False  # the backend raised instead of giving an answer that could be judged


@dataclass(frozen=True)
class Certificate:
    """The checks of one backend, and whether they passed."""

    subject: str
    settings: dict[str, str]
    checks: tuple[Check, ...]
    seconds: float
    part_seconds: dict[str, float] = field(default_factory=dict)
    left_out: str = ""  # what a quick certificate does not show

    @classmethod
    def of(
        cls,
        subject: str,
        settings: dict[str, str],
        checks: list[Check],
        seconds: float,
        part_seconds: dict[str, float] | None = None,
        left_out: str = "",
    ) -> "Certificate":
        """Decides the statistical checks together, so that their number does not fail a sound backend."""
        undecided = [c.p_value for c in checks if c.p_value is not None and c.passed is None]
        adjusted = iter(holm(undecided))
        decided = []
        for check in checks:
            if check.p_value is not None and check.passed is None:
                p_value = next(adjusted)
                check = replace(check, adjusted=p_value, passed=p_value >= ALPHA)
            decided.append(check)
        return cls(subject, settings, tuple(decided), seconds, part_seconds or {}, left_out)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.promised and not check.passed]

    @property
    def passed(self) -> bool:
        """Returns whether every promised check passed, and at least one place of a step could be tested."""
        return self._tested and not self.failed

    @property
    def _tested(self) -> bool:
        return any(check.promised and check.power for check in self.checks)

    def table(self) -> str:
        """Returns the certificate for human readers: a line per check, and the verdict."""
        width = min(44, max(len(check.name) for check in self.checks))
        lines = [f"{self.subject}: {', '.join(f'{key} {value}' for key, value in self.settings.items())}"]
        part = None
        for check in self.checks:
            if check.part != part:
                part = check.part
                lines += ["", f"{part} ({self.part_seconds.get(part, 0):.0f} s)" if part else ""]
                lines = lines if part else lines[:-1]
            lines.append(_line(check, width))
        return "\n".join([*lines, "", *self._closing()])

    def _closing(self) -> list[str]:
        lines = []
        if any(check.power for check in self.checks):
            lines.append(
                "finds: the total variation between what is sampled and what should be, by the token's place "
                f"in its step, that would have been found with {100 * PROBABILITY:.0f}% probability"
            )
        if self.left_out:
            lines.append(f"left out: {self.left_out}")
        failed = self.failed
        why = "nothing could be tested; take more samples or a policy that is less sure"
        if failed:
            why = f"{len(failed)} of {len(self.checks)} checks, the first: {failed[0].name}"
        verdict = "PASSED" if self.passed else f"FAILED: {why}"
        once = f"a sound backend fails once in {1 / ALPHA:.0f} times"
        return [*lines, f"{verdict} ({self.seconds:.0f} s; {once})"]

    def json(self) -> str:
        record = {
            "subject": self.subject,
            "passed": self.passed,
            "alpha": ALPHA,
            "settings": self.settings,
            "seconds": self.seconds,
            "part_seconds": self.part_seconds,
            "left_out": self.left_out,
        }
        return json.dumps({**record, "checks": [asdict(check) for check in self.checks]}, indent=2) + "\n"


def _line(check: Check, width: int) -> str:
    word = "ok" if check.passed else "FAILED"
    if not check.promised:
        word = "left out" if check.left_out else "noted"
    p_value = ""
    if check.p_value is not None and check.adjusted is not None:
        p_value = f"p {_figure(check.p_value)} ({_figure(check.adjusted)} among all)  "
    found = ", ".join(
        f"{power.place} {percent(power.total_variation)}"
        for power in check.power
        if power.total_variation is not None
    )
    finds = f"; finds {found}" if found else ""
    return f"{word:<9}{check.name:<{width}}  {p_value}{check.detail}{finds}"


def _figure(p_value: float) -> str:
    return f"{p_value:.3f}" if p_value >= 0.001 else f"{p_value:.0e}"
