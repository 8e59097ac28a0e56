"""The verdict: every check with its figures, as a table and as JSON."""

import json
from dataclasses import asdict, dataclass

from paceline.certify.statistics import holm

ALPHA = 1e-3  # chance that a sound backend fails any of the statistical checks


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `p_value` is None where it holds or does not, without chance."""

    name: str
    passed: bool | None  # None: decided with the other p-values, or only reported
    detail: str
    p_value: float | None = None
    adjusted: float | None = None
    promised: bool = True  # False: reported, but nobody said it would hold


@dataclass(frozen=True)
class Certificate:
    subject: str
    settings: dict[str, str]
    checks: tuple[Check, ...]
    seconds: float

    @classmethod
    def of(cls, subject: str, settings: dict[str, str], checks: list[Check], seconds: float) -> "Certificate":
        """Decides the statistical checks together, so that many of them do not fail a sound backend by
        chance.
        """
        tested = [check for check in checks if check.p_value is not None]
        adjusted = dict(zip(map(id, tested), holm([check.p_value for check in tested]), strict=True))
        decided = []
        for check in checks:
            if check.p_value is not None:
                values = {
                    **vars(check),
                    "adjusted": adjusted[id(check)],
                    "passed": adjusted[id(check)] >= ALPHA,
                }
                check = Check(**values)
            decided.append(check)
        return cls(subject, settings, tuple(decided), seconds)

    @property
    def passed(self) -> bool:
        """Without a single frequency that could be tested there is nothing to certify."""
        return all(check.passed for check in self.checks if check.promised) and any(
            check.p_value is not None for check in self.checks
        )

    def table(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"{self.subject}: {', '.join(f'{key} {value}' for key, value in self.settings.items())}", ""]
        for check in self.checks:
            word = "noted" if not check.promised else "ok" if check.passed else "FAILED"
            p_value = (
                ""
                if check.p_value is None
                else f"p {_figure(check.p_value)} ({_figure(check.adjusted)} among all)  "
            )
            lines.append(f"{word:<7}{check.name:<{width}}  {p_value}{check.detail}")
        failed = sum(1 for check in self.checks if check.promised and not check.passed)
        why = (
            f"{failed} of {len(self.checks)} checks"
            if failed
            else "no frequency could be tested; take more samples or a policy that is less sure"
        )
        verdict = "PASSED" if self.passed else f"FAILED: {why}"
        return "\n".join(
            [
                *lines,
                "",
                f"{verdict} ({self.seconds:.0f} s; a sound backend fails once in {1 / ALPHA:.0f} times)",
            ]
        )

    def json(self) -> str:
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
