"""NVIDIA's published steps and draft lengths for Qwen3-8B on GB200.

What they do not state is named as assumed or counted as free.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from benchmarks.simulator.check import FIT, PREDICTION, Check, Section
from paceline.simulate.deployment import ENGINES, Deployment, EngineProfile
from paceline.simulate.hardware import load_hardware
from paceline.simulate.model_shape import load_model
from paceline.simulate.outcome import Outcome
from paceline.simulate.scenario import Scenario, simulate
from paceline.simulate.speculation import Acceptance, Speculation, eagle, history
from paceline.simulate.step_cost import StepCost
from paceline.simulate.workload import Lengths, Workload

SOURCE = (
    "Accelerating RL Post-Training Rollouts via System-Integrated Speculative Decoding, arXiv 2604.26779; "
    "figures from a secondary transcription"
)


@dataclass(frozen=True)
class PublishedStep:
    """The seconds of one step of Qwen3-8B on 32 GB200."""

    sync: float
    generation: float
    logprob: float
    train: float
    total: float


# By workload: plain, and with k = 3.
STEPS = {
    "Think": (PublishedStep(2.1, 133.6, 17.9, 31.4, 185.3), PublishedStep(1.6, 87.0, 18.1, 30.5, 137.4)),
    "Zero": (PublishedStep(1.9, 100.0, 17.8, 31.3, 151.2), PublishedStep(2.1, 56.6, 18.1, 30.5, 107.5)),
}
# Generation speed-up by workload and k.
K_SWEEP = {"Zero": {3: 1.77, 5: 1.44, 7: 1.21}, "Think": {3: 1.53, 5: 0.84, 7: 0.71}}
# Of n-gram drafting: accept length, generation speed-up.
NGRAM = {"Zero": (2.47, 0.7), "Think": (2.05, 0.5)}
# The asynchronous run on 16 nodes: step and exposed generation without speculation, step with it.
ASYNC_STEP = 75.0
ASYNC_EXPOSED = 10.4
ASYNC_SPECULATIVE_STEP = 60.5
# Sigma of the log-normal lengths, for both workloads.
LENGTH_SPREAD = 0.3
# Tokens a row that are assumed to be in the cache during the sweep of k.
CONTEXT = 2000.0


def step_scenario(rows: int, acceptance: float, mean: float, k: int) -> Scenario:
    """Returns their step; responses a device and mean length are not stated."""
    return Scenario(
        load_hardware("gb200"),
        load_model("qwen3-8b"),
        gpus=32,
        engine="vllm",
        max_running=512,
        workload=Workload(rows * 32 // 16, 16, 512, Lengths(mean, LENGTH_SPREAD, 64, 40000)),
        speculation=Speculation((k,), Acceptance((acceptance,))),
    )


def mean_length_for(seconds: float, rows: int) -> float:
    """Returns the mean response length whose plain rollout takes this long, by bisection."""
    low, high = 256.0, 32768.0
    for _ in range(11):
        middle = (low * high) ** 0.5
        if simulate(step_scenario(rows, 0.0, middle, 0)).rollout_seconds < seconds:
            low = middle
        else:
            high = middle
    return low


def steps() -> Section:
    """Compares the stages of a step, for both workloads."""
    checks: list[Check] = []
    remarks: list[str] = []
    for workload, (plain, _) in STEPS.items():
        rows, acceptance, _ = fit_k_sweep(ENGINES["vllm"], K_SWEEP[workload], tuple(K_SWEEP[workload]))
        mean = mean_length_for(plain.generation, rows)
        ours = [simulate(step_scenario(rows, acceptance, mean, k)) for k in (0, 3)]
        checks += _step_checks(workload, *ours)
        remarks.append(
            f"{workload}: {rows} responses a device, acceptance {acceptance:.2f} per token "
            f"(from the sweep below), mean length {mean:.0f}."
        )
    utilisation = load_hardware("gb200").training.logprob_utilisation
    logprob = next(check for check in checks if check.what == "Think: logprob")
    needed = utilisation * logprob.predicted / logprob.measured
    remarks += [
        "Batch and lengths are not stated in what we have. Per workload three parameters (responses, "
        "acceptance, mean length) are set by the generation figures, and one spread of the lengths for both "
        f"({LENGTH_SPREAD:g}) by the Think training time: generation is a fit; what is predicted are the "
        "other stages and the totals.",
        f"Logprob is the miss: the term is its assumed utilisation ({100 * utilisation:.0f}% of the data "
        f"sheet); {100 * needed:.0f}% would meet it. Weight sync is a fixed second here, and under 2% of a "
        "step.",
        f"Async: a step of {ASYNC_STEP} s with {ASYNC_EXPOSED} s of exposed generation leaves a learner of "
        f"{ASYNC_STEP - ASYNC_EXPOSED:.1f} s, and speculation hides generation entirely. The published step "
        "is shorter than that learner: its own time changed too, which no term here can know.",
    ]
    checks.append(_async_check())
    return Section("NVIDIA's step table (Qwen3-8B, 32 GB200)", SOURCE, tuple(checks), tuple(remarks))


def _step_checks(workload: str, plain: Outcome, fast: Outcome) -> list[Check]:
    theirs, theirs_fast = STEPS[workload]
    stages = plain.stages
    speedups = (theirs.total / theirs_fast.total, plain.step_seconds / fast.step_seconds)
    train_kind = FIT if workload == "Think" else PREDICTION
    return [
        Check(f"{workload}: generation, plain", theirs.generation, plain.rollout_seconds, "s", FIT),
        Check(f"{workload}: generation, k = 3", theirs_fast.generation, fast.rollout_seconds, "s", FIT),
        Check(f"{workload}: train", theirs.train, stages.train, "s", train_kind),
        Check(f"{workload}: logprob", theirs.logprob, stages.logprob, "s"),
        Check(f"{workload}: weight sync", theirs.sync, stages.sync, "s"),
        Check(f"{workload}: total, plain", theirs.total, plain.step_seconds, "s"),
        Check(f"{workload}: total, k = 3", theirs_fast.total, fast.step_seconds, "s"),
        Check(f"{workload}: step speed-up", *speedups),
    ]


def _async_check() -> Check:
    plain, fast = STEPS["Think"]
    learner = ASYNC_STEP - ASYNC_EXPOSED
    generation = ASYNC_STEP / (plain.generation / fast.generation)
    step = learner + max(0.0, generation - learner)
    return Check("async, 16 nodes: step with speculation", ASYNC_SPECULATIVE_STEP, step, "s")


def fit_k_sweep(
    engine: EngineProfile, targets: dict[int, float], seen: tuple[int, ...]
) -> tuple[int, float, dict[int, float]]:
    """Returns rows a device, acceptance per token and predicted speed-ups.

    They have the least worst error on the depths in `seen`.
    """
    shape = load_model("qwen3-8b")
    cost = StepCost(Deployment(load_hardware("gb200"), shape, engine), eagle(shape))
    rows = np.arange(4, 513, 4)
    seconds = {}
    for k in (0, *targets):
        linear = cost.linear(512, k)
        seconds[k] = linear.fixed[rows] + linear.per_key * rows * CONTEXT + linear.per_longest * CONTEXT
    best: tuple[float, int, float, dict[int, float]] | None = None
    for probability in np.arange(0.30, 0.96, 0.01):
        acceptance = Acceptance((float(probability),))
        ratios = {k: acceptance.accept_length(k) * seconds[0] / seconds[k] for k in targets}
        errors = np.max([np.abs(np.log(ratios[k] / targets[k])) for k in seen], axis=0)
        i = int(np.argmin(errors))
        if best is None or errors[i] < best[0]:
            predicted = {k: float(ratios[k][i]) for k in targets}
            best = (float(errors[i]), int(rows[i]), float(probability), predicted)
    assert best is not None
    return best[1:]


def k_sweep() -> Section:
    vllm = ENGINES["vllm"]
    without = dataclasses.replace(vllm, graph_tokens=0)
    checks: list[Check] = []
    remarks: list[str] = []
    for workload, targets in K_SWEEP.items():
        rows, acceptance, predicted = fit_k_sweep(vllm, targets, tuple(targets))
        _, _, ablated = fit_k_sweep(without, targets, tuple(targets))
        _, _, ends = fit_k_sweep(vllm, targets, (3, 7))
        checks += [Check(f"{workload}, k = {k}", targets[k], predicted[k], kind=FIT) for k in targets]
        checks.append(Check(f"{workload}, k = 5, from k = 3 and 7 alone", targets[5], ends[5]))
        worst, worst_ablated = (
            max(abs(p[k] / targets[k] - 1) for k in targets) for p in (predicted, ablated)
        )
        remarks.append(
            f"{workload}: {rows} rows a device and {acceptance:.2f} acceptance per token fit best, "
            f"worst error {100 * worst:.0f}%. Ablation: without the graph limit (steps of more than "
            f"{vllm.graph_tokens} tokens launch every kernel by hand) the best fit misses by "
            f"{100 * worst_ablated:.0f}%."
        )
        remarks.append(_ngram_remark(workload, rows))
    remarks.append(
        "Two free parameters for three points: a fit, not a prediction. The drop between k = 3 and 5 in the "
        "Think run (1.53 to 0.84) is steeper than arithmetic allows: six tokens a row instead of four can "
        "cost at most 1.5 times as much. A limit that the step runs into is needed, and vLLM's graph capture "
        "limit is one at the right place; that it was this limit is our guess."
    )
    return Section("NVIDIA's sweep of draft lengths", SOURCE, tuple(checks), tuple(remarks))


def _ngram_remark(workload: str, rows: int) -> str:
    """Says what n-gram drafting must have cost: it was slower than none although it accepted tokens."""
    accept, measured = NGRAM[workload]
    deployment = Deployment(load_hardware("gb200"), load_model("qwen3-8b"), ENGINES["vllm"])
    cost = StepCost(deployment, history())
    plain, verify = cost.step(rows, 0, CONTEXT), cost.step(rows, 3, CONTEXT)
    missing = accept * plain / measured - verify
    return (
        f"{workload}, n-gram drafting (k = 3 assumed): accept length {accept:g} would give "
        f"{accept * plain / verify:.2f}x with drafting for free; {measured:g}x was measured. "
        f"The missing term is the drafter's own time, {missing * 1e3:.0f} ms a step here; "
        "the model has it as a drafter's `fixed_seconds`."
    )
