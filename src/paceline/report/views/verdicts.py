"""Verdicts in words: does the policy learn, is it faster, is it exact? And where does the time go?

Each is a card with a tone (good, bad, warn or "") that rests on intervals, not on single values.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.report.run_data import RunData
from paceline.report.views.charts import AFTER_ROLLOUT, stage_seconds

# Steps at either end of a run that are averaged where there is no evaluation, as a share and at least.
END_SHARE = 0.1
END_STEPS = 3

Card = dict[str, Any]


def cards(run: RunData) -> list[Card]:
    if run.train.has("sft/loss"):
        return [loss_card(run), time_card(run)]
    return [learning_card(run), speed_card(run), exactness_card(run), time_card(run)]


def card(question: str, verdict: str, detail: str, tone: str = "", shares: Sequence[Any] = ()) -> Card:
    return {"question": question, "verdict": verdict, "detail": detail, "tone": tone, "shares": list(shares)}


def learning_card(run: RunData) -> Card:
    """Returns whether the policy learned: from evaluations, or from rewards if there are fewer than two."""
    question = "Does the policy learn?"
    evals = run.evals
    known = np.flatnonzero(np.isfinite(evals["eval/accuracy"]))
    if len(known) < 2:
        return _rewards_card(question, run)
    first, last = known[0], known[-1]
    graded = run.graded
    name, scale, unit, digits = ("eval/reward", 1, "", 3) if graded else ("eval/accuracy", 100, "%", 1)
    values, low, high = (scale * column for column in (evals[name], *evals.interval(name)))
    before, after = values[first], values[last]
    change = after - before
    verdict = f"{before:.{digits}f}{unit} → {after:.{digits}f}{unit}"
    problems = evals["eval/problems"][last]
    of = f" of {problems:.0f} held-out problems" if np.isfinite(problems) else " of held-out problems"
    ends = [f"[{low[place]:.{digits}f}, {high[place]:.{digits}f}]" for place in (first, last)]
    what = "Mean reward" if graded else "Correct"
    detail = f"{what}{of}, before {ends[0]} and after {evals.steps[last]} steps {ends[1]}. "
    # Newcombe's interval of a difference, from both 95% intervals.
    if change > math.hypot(after - low[last], high[first] - before):
        return card(question, f"Yes: {verdict}", f"{detail}The gain is beyond both 95% intervals.", "good")
    if -change > math.hypot(high[last] - after, before - low[first]):
        return card(
            question, f"It got worse: {verdict}", f"{detail}The loss is beyond both intervals.", "bad"
        )
    return card(
        question, f"Too close to tell: {verdict}", f"{detail}The change is within the intervals.", "warn"
    )


def loss_card(run: RunData) -> Card:
    """Returns whether the held-out loss of supervised fine-tuning fell, or else that of its steps."""
    question = "Does the policy learn?"
    held_out, steps = run.evals.known("eval/loss"), run.train.known("sft/loss")
    values, what = (held_out, "Held-out loss") if len(held_out) > 1 else (steps, "Loss of the steps")
    verdict = f"loss {values[0]:.4g} → {values[-1]:.4g}"
    lowest = int(values.argmin())
    detail = f"{what}, {len(values)} values, lowest {values[lowest]:.4g}."
    if values[-1] >= values[0]:
        return card(question, f"No: {verdict}", detail, "bad")
    if len(held_out) > 1 and lowest < len(values) - 1:
        detail += f" It rises since step {run.evals.steps[lowest]}, whose policy is in checkpoints/best."
        return card(question, f"Yes, but longer than it pays: {verdict}", detail, "warn")
    return card(question, f"Yes: {verdict}", detail, "good")


def _rewards_card(question: str, run: RunData) -> Card:
    rewards = run.train.known("reward/mean")
    if len(rewards) < 2 * END_STEPS:
        return card(
            question, "Too early to tell", f"{len(rewards)} steps so far, and no second evaluation.", "warn"
        )
    ends = max(END_STEPS, int(END_SHARE * len(rewards)))
    first, last = rewards[:ends], rewards[-ends:]
    error = 2.0 * math.hypot(first.std(ddof=1), last.std(ddof=1)) / math.sqrt(ends)
    change = float(last.mean() - first.mean())
    verdict = f"reward {first.mean():.3g} → {last.mean():.3g}"
    detail = f"Means of the first and last {ends} steps; there is no second evaluation yet."
    if abs(change) <= error:
        return card(question, f"Too close to tell: {verdict}", detail, "warn")
    if change > 0:
        return card(question, f"It seems so: {verdict}", detail, "good")
    return card(question, f"It got worse: {verdict}", detail, "bad")


def time_card(run: RunData) -> Card:
    """Returns the stage that takes the most time."""
    question = "Where does the time go?"
    parts = {name: float(column.sum()) for name, column in stage_seconds(run).items()}
    whole = sum(parts.values())
    if not whole:
        return card(question, "No step yet", "There is no time to divide.", "warn")
    after = {name: parts[name] for name in AFTER_ROLLOUT}
    rollout = whole - sum(after.values())
    named = {"rollout": rollout, **after}
    largest = max(named, key=lambda name: named[name])
    shares = [
        [name, seconds / whole, i]
        for i, (name, seconds) in enumerate(parts.items())
        if seconds > 0.002 * whole
    ]
    step = (
        float(np.median(run.train.known("time/step")))
        if run.train.has("time/step")
        else whole / len(run.train)
    )
    detail = f"A step takes {_seconds(step)} (median)."
    if rollout:
        share = f"{100 * parts['tail'] / rollout:.0f}%"
        detail += f" The tail, with at most an eighth of the samples running, is {share} of the rollout."
    return card(question, f"{largest.capitalize()}: {100 * named[largest] / whole:.0f}%", detail, "", shares)


def speed_card(run: RunData) -> Card:
    """Returns what speculation gained: by the closing check where there is one, else by what was accepted."""
    question = "Is the rollout faster?"
    closing = _closing(run)
    if closing is not None:
        return _closing_card(question, closing)
    if not run.train.has("speculation/accept_length"):
        return card(question, "Speculation was off", "No step of this run speculated.")
    recent = run.train.known("speculation/accept_length")[-20:]
    share = run.train.known("speculation/steps")[-20:]
    detail = (
        f"Over the last {len(recent)} steps, in {100 * share.mean():.0f}% of their decode steps. "
        "How much time that saves is measured at the end of the run."
    )
    return card(question, f"{recent.mean():.2f} tokens per draft", detail)


def exactness_card(run: RunData) -> Card:
    """Returns whether speculation kept the tokens, where the closing check says so, and the mismatch."""
    question = "Is it exact?"
    recent = run.train.known("mismatch/k3")[-20:]
    detail = (
        f"Rollout and learner score the same tokens {np.median(recent):.2g} nats per token apart "
        f"(k3, median of the last {len(recent)} steps). "
        if len(recent)
        else ""
    )
    closing = _closing(run)
    same = closing["identical"] if closing is not None else None
    if same:
        return card(question, "Yes: the same tokens", f"{detail}Plain decoding wrote the same.", "good")
    if same is False:
        cure = "On a CPU that is a defect; a GPU rounds alike with rollout.deterministic=true alone."
        return card(question, "No: other tokens than plain decoding", f"{detail}{cure}", "bad")
    if not detail:
        return card(question, "Not measured", "No step compared rollout and learner.")
    unchecked = "No check has compared its tokens with plain decoding's."
    return card(question, f"Mismatch {np.median(recent):.2g}", f"{detail}{unchecked}")


def _closing_card(question: str, closing: dict[str, Any]) -> Card:
    ratio, low, high = closing["ratio"], closing["ratio_low"], closing["ratio_high"]
    steps = f"{closing['paced_steps']} policy steps instead of {closing['plain_steps']}"
    detail = (
        f"One late step's rollout, made {closing['repeats']} times each way in turn: {steps}. "
        f"Times as fast as plain decoding: median {ratio:.2f}, between {low:.2f} and {high:.2f}."
    )
    if closing["too_noisy"]:
        return card(question, "Too noisy to tell", detail, "warn")
    if low > 1.0:
        return card(question, f"{ratio:.2f}x as fast", detail, "good")
    return card(question, f"Slower: {ratio:.2f}x", detail, "bad")


def _closing(run: RunData) -> dict[str, Any] | None:
    """Returns the closing check's record, unless it is damaged."""
    record = run.closing or {}
    numbers = ("ratio", "ratio_low", "ratio_high", "plain_steps", "paced_steps", "repeats")
    sound = all(isinstance(record.get(name), int | float) for name in numbers)
    known = "too_noisy" in record and record.get("identical", "") in (True, False, None)
    return record if sound and known else None


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 100 else f"{value:.0f} s"
