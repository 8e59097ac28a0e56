"""The certificate: every check with its figures, as a table and as JSON."""

import json
from dataclasses import asdict, dataclass, replace

from paceline.certify.power import Power
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


@dataclass(frozen=True)
class Certificate:
    """The checks of one backend, and whether they passed."""

    subject: str
    settings: dict[str, str]
    checks: tuple[Check, ...]
    seconds: float

    @classmethod
    def of(cls, subject: str, settings: dict[str, str], checks: list[Check], seconds: float) -> "Certificate":
        """Decides the statistical checks together, so that their number does not fail a sound backend."""
        adjusted = iter(holm([check.p_value for check in checks if check.p_value is not None]))
        decided = []
        for check in checks:
            if check.p_value is not None:
                p_value = next(adjusted)
                check = replace(check, adjusted=p_value, passed=p_value >= ALPHA)
            decided.append(check)
        return cls(subject, settings, tuple(decided), seconds)

    @property
    def passed(self) -> bool:
        """Returns whether every promised check passed, and at least one place of a step could be tested."""
        tested = any(check.promised and check.power for check in self.checks)
        return tested and all(check.passed for check in self.checks if check.promised)

    def table(self) -> str:
        """Returns the certificate for human readers: a line per check, and the verdict."""
        width = max(len(check.name) for check in self.checks)
        lines = [f"{self.subject}: {', '.join(f'{key} {value}' for key, value in self.settings.items())}", ""]
        for check in self.checks:
            word = "noted" if not check.promised else "ok" if check.passed else "FAILED"
            p_value = ""
            if check.p_value is not None:
                p_value = f"p {_figure(check.p_value)} ({_figure(check.adjusted)} among all)  "
            lines.append(f"{word:<7}{check.name:<{width}}  {p_value}{check.detail}")
        failed = sum(1 for check in self.checks if check.promised and not check.passed)
        why = (
            f"{failed} of {len(self.checks)} checks"
            if failed
            else "no frequency could be tested; take more samples or a policy that is less sure"
        )
        verdict = "PASSED" if self.passed else f"FAILED: {why}"
        closing = f"{verdict} ({self.seconds:.0f} s; a sound backend fails once in {1 / ALPHA:.0f} times)"
        return "\n".join([*lines, "", closing])

    def json(self) -> str:
        """Returns the certificate as JSON."""
        record = {
            "subject": self.subject,
            "passed": self.passed,
            "alpha": ALPHA,
            "settings": self.settings,
            "seconds": self.seconds,
        }
        return json.dumps({**record, "checks": [asdict(check) for check in self.checks]}, indent=2) + "\n"


def _figure(p_value: float) -> str:
    return f"{p_value:.3f}" if p_value >= 0.001 else f"{p_value:.0e}"
