"""All views of some runs as one record: what a report carries whole and a dashboard fetches part by part."""

from collections.abc import Sequence
from typing import Any

from paceline.plots.document import Section
from paceline.report.run_data import RunData
from paceline.report.views.compare import comparison
from paceline.report.views.health import health_charts
from paceline.report.views.learning import learning_charts
from paceline.report.views.speculation import speculation_charts
from paceline.report.views.time import memory_charts, time_charts
from paceline.report.views.verdicts import cards

# What the settings line of a single run names, where the recipe has it.
SETTINGS = {
    "policy.path": "policy",
    "task.name": "task",
    "learning.algorithm": "algorithm",
    "rollout.prompts_per_step": "prompts per step",
    "rollout.samples_per_prompt": "samples per prompt",
    "run.seed": "seed",
}


def payload(runs: Sequence[RunData], limit: int) -> dict[str, Any]:
    """Returns title, verdicts, tables and sections of charts, with at most `limit` points a curve.

    The caller adds what concerns single steps: `tails` and `samples`.
    """
    several = len(runs) > 1
    words, tables = comparison(runs) if several else ([], [])
    answers = [_named(run, answer) for run in runs for answer in cards(run)] if several else cards(runs[0])
    return {
        "title": " and ".join(run.label for run in runs[:3]) + (" and others" if len(runs) > 3 else ""),
        "subtitle": _subtitle(runs),
        "cards": answers,
        "words": words,
        "tables": tables,
        "sections": sections(runs, limit),
        "tails": [],
        "samples": [],
    }


def sections(runs: Sequence[RunData], limit: int) -> list[dict[str, Any]]:
    """Returns the sections that have a chart."""
    found = [
        Section("learning", "Does the policy learn?", "Learning", "", learning_charts(runs, limit)),
        Section(
            "time",
            "Where does the time go?",
            "Time",
            "An RL step is a rollout (the policy answers prompts), an update, and the weights' handover.",
            time_charts(runs, limit),
        ),
        Section(
            "speculation",
            "What did speculation give?",
            "Speculation",
            "A drafter proposes several tokens and the policy checks them in one pass. What is sampled "
            "does not change; how many passes it takes does.",
            speculation_charts(runs, limit),
        ),
        Section(
            "health",
            "Can the samples be trusted?",
            "Mismatch",
            "Rollout and learner compute the same probabilities with different code, perhaps at different "
            "precision; the difference is measured before every update.",
            health_charts(runs, limit),
        ),
        Section("memory", "Memory", "Memory", "", memory_charts(runs, limit)),
    ]
    records = [section.record() for section in found]
    return [record for record in records if record["charts"]]


def _named(run: RunData, answer: dict[str, Any]) -> dict[str, Any]:
    return answer | {"question": f"{run.label}: {answer['question'][:1].lower()}{answer['question'][1:]}"}


def _subtitle(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs side by side; times are compared with the first, {runs[0].label}."
    run = runs[0]
    known = [f"{name} {run.settings[key]}" for key, name in SETTINGS.items() if key in run.settings]
    steps = f"{run.train.steps[-1] if len(run.train) else 0} of {run.settings.get('run.steps', '?')} steps"
    return ", ".join([steps, *known])[:600]
