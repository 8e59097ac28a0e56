"""Figures that others published, with the inputs they state. What they do not state is named as assumed or
counted as free.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paceline.simulate.deployment import ENGINES, Deployment, Engine, Parallelism, Precision
from paceline.simulate.hardware import Hardware, load_hardware
from paceline.simulate.model_shape import load_model
from paceline.simulate.predict import verify_seconds
from paceline.simulate.questions import ask
from paceline.simulate.scenario import Scenario, simulate
from paceline.simulate.speculation import Acceptance, Speculation, eagle, history
from paceline.simulate.step_cost import StepCost
from paceline.simulate.validation.check import FIT, PREDICTION, Check, Section, predictions, worst_error
from paceline.simulate.workload import Lengths, Workload

NVIDIA = "Accelerating RL Post-Training Rollouts via System-Integrated Speculative Decoding, arXiv 2604.26779; figures from a secondary transcription"
TLT = "Taming the Long-Tail, arXiv 2511.16665; figures from a secondary transcription"

# Seconds per step of Qwen3-8B on 32 GB200: (sync, generation, logprob, train, total)
NVIDIA_STEPS = {
    "Think, plain": (2.1, 133.6, 17.9, 31.4, 185.3),
    "Think, k = 3": (1.6, 87.0, 18.1, 30.5, 137.4),
    "Zero, plain": (1.9, 100.0, 17.8, 31.3, 151.2),
    "Zero, k = 3": (2.1, 56.6, 18.1, 30.5, 107.5),
}
NVIDIA_K = {"Zero": {3: 1.77, 5: 1.44, 7: 1.21}, "Think": {3: 1.53, 5: 0.84, 7: 0.71}}
NVIDIA_NGRAM = {"Zero": (2.47, 0.7), "Think": (2.05, 0.5)}  # accept length, generation speed-up
TLT_SPEEDUP = {
    1: {16: 3.22, 32: 3.46, 48: 3.56, 64: 3.62},
    8: {16: 2.73, 32: 2.63, 48: 2.51, 64: 2.27},
    32: {16: 2.48, 32: 2.23, 48: 1.90, 64: 1.70},
}
LENGTH_SPREAD = 0.3  # sigma of the log-normal
TLT_NODES = {1: 1.21, 8: 1.76}
TLT_DEPTH, TLT_TOPK = 8, 4  # of the published benchmark script: draft passes, and rows of each per request


def cost_on(hardware: str | Hardware, model: str, tensor: int, engine: Engine) -> StepCost:
    device = load_hardware(hardware) if isinstance(hardware, str) else hardware
    shape = load_model(model)
    return StepCost(Deployment(device, shape, engine, Precision(), Parallelism(tensor)), eagle(shape))


def nvidia_scenario(rows: int, acceptance: float, mean: float, k: int) -> Scenario:
    """Batch and lengths are not stated: `rows` responses a device and a log-normal with this mean and little
    spread.
    """
    return Scenario(
        load_hardware("gb200"),
        load_model("qwen3-8b"),
        32,
        engine="vllm",
        max_running=512,
        workload=Workload(rows * 32 // 16, 16, 512, Lengths(mean, LENGTH_SPREAD, 64, 40000)),
        speculation=Speculation((k,), Acceptance((acceptance,))),
    )


def mean_length_for(seconds: float, rows: int) -> float:
    """The mean response length whose plain rollout takes this long."""
    low, high = 256.0, 32768.0
    for _ in range(11):
        middle = (low * high) ** 0.5
        low, high = (
            (middle, high)
            if simulate(nvidia_scenario(rows, 0.0, middle, 0)).rollout_seconds < seconds
            else (low, middle)
        )
    return low


def nvidia_steps() -> Section:
    checks, remarks = [], []
    for workload in ("Think", "Zero"):
        plain, fast = NVIDIA_STEPS[f"{workload}, plain"], NVIDIA_STEPS[f"{workload}, k = 3"]
        rows, acceptance, _ = fit_k_sweep(ENGINES["vllm"], NVIDIA_K[workload], tuple(NVIDIA_K[workload]))
        mean = mean_length_for(plain[1], rows)
        ours = {k: simulate(nvidia_scenario(rows, acceptance, mean, k)) for k in (0, 3)}
        stages = ours[0].stages
        checks += [
            Check(f"{workload}: generation, plain", plain[1], ours[0].rollout_seconds, "s", FIT),
            Check(f"{workload}: generation, k = 3", fast[1], ours[3].rollout_seconds, "s", FIT),
            Check(
                f"{workload}: train", plain[3], stages.train, "s", FIT if workload == "Think" else PREDICTION
            ),
            Check(f"{workload}: logprob", plain[2], stages.logprob, "s", PREDICTION),
            Check(f"{workload}: weight sync", plain[0], stages.sync, "s", PREDICTION),
            Check(f"{workload}: total, plain", plain[4], ours[0].step_seconds, "s", PREDICTION),
            Check(f"{workload}: total, k = 3", fast[4], ours[3].step_seconds, "s", PREDICTION),
            Check(
                f"{workload}: step speed-up",
                plain[4] / fast[4],
                ours[0].step_seconds / ours[3].step_seconds,
                "x",
                PREDICTION,
            ),
        ]
        remarks.append(
            f"{workload}: {rows} responses a device, acceptance {acceptance:.2f} per token (from the sweep "
            f"below), mean length {mean:.0f}."
        )
    utilisation = load_hardware("gb200").training.logprob_utilisation
    needed = utilisation * checks[3].predicted / checks[3].measured
    learner = 75.0 - 10.4
    speedup = NVIDIA_STEPS["Think, plain"][1] / NVIDIA_STEPS["Think, k = 3"][1]
    checks.append(
        Check(
            "async, 16 nodes: step with speculation",
            60.5,
            learner + max(0.0, 75.0 / speedup - learner),
            "s",
            PREDICTION,
        )
    )
    remarks += [
        "Batch and lengths are not stated in what we have. Per workload three parameters (responses, "
        "acceptance, mean length) are set by the "
        "generation figures, and one spread of the "
        f"lengths for both ({LENGTH_SPREAD:g}) by the Think training time: generation is a fit; what is "
        "predicted are the other stages and the "
        "totals.",
        f"Logprob is the miss: the term is its assumed utilisation ({100 * utilisation:.0f}% of the data "
        f"sheet); {100 * needed:.0f}% would meet "
        "it. Weight sync is a fixed second here, and under 2% of a step.",
        "Async: a step of 75.0 s with 10.4 s of exposed generation leaves a learner of 64.6 s, and "
        "speculation hides generation entirely. The "
        "published step is shorter than "
        "that learner: its own time changed too, which no term here can know.",
    ]
    return Section("NVIDIA's step table (Qwen3-8B, 32 GB200)", NVIDIA, tuple(checks), tuple(remarks))


def fit_k_sweep(
    engine: Engine, targets: dict[int, float], seen: tuple[int, ...], context: float = 2000.0
) -> tuple[int, float, dict[int, float]]:
    """(rows a device, acceptance per token, predicted speed-ups) with the least worst error on the depths in
    `seen`.
    """
    cost = cost_on("gb200", "qwen3-8b", 1, engine)
    linear = {k: cost.linear(512, k) for k in (0, *targets)}
    rows = np.arange(4, 513, 4)
    best: tuple[float, int, float, dict[int, float]] | None = None
    for acceptance in np.arange(0.30, 0.96, 0.01):
        lengths = {k: Acceptance((float(acceptance),)).accept_length(k) for k in targets}
        plain = linear[0].fixed[rows] + linear[0].per_key * rows * context + linear[0].per_longest * context
        ratios = {
            k: lengths[k]
            * plain
            / (linear[k].fixed[rows] + linear[k].per_key * rows * context + linear[k].per_longest * context)
            for k in targets
        }
        errors = np.max([np.abs(np.log(ratios[k] / targets[k])) for k in seen], axis=0)
        i = int(np.argmin(errors))
        if best is None or errors[i] < best[0]:
            best = (
                float(errors[i]),
                int(rows[i]),
                float(acceptance),
                {k: float(ratios[k][i]) for k in targets},
            )
    assert best is not None
    return best[1], best[2], best[3]


def nvidia_k_sweep() -> Section:
    vllm = ENGINES["vllm"]
    without = dataclasses.replace(vllm, graph_tokens=0)
    checks, remarks = [], []
    for workload, targets in NVIDIA_K.items():
        rows, acceptance, predicted = fit_k_sweep(vllm, targets, tuple(targets))
        checks += [Check(f"{workload}, k = {k}", targets[k], predicted[k], "x", FIT) for k in targets]
        _, _, ablated = fit_k_sweep(without, targets, tuple(targets))
        worst, worst_ablated = (
            max(abs(p[k] / targets[k] - 1) for k in targets) for p in (predicted, ablated)
        )
        _, _, ends = fit_k_sweep(vllm, targets, (3, 7))
        checks.append(
            Check(f"{workload}, k = 5, from k = 3 and 7 alone", targets[5], ends[5], "x", PREDICTION)
        )
        remarks.append(
            f"{workload}: {rows} rows a device and {acceptance:.2f} acceptance per token fit best, worst "
            f"error {100 * worst:.0f}%. "
            f"Ablation: without the graph limit (steps of more than {vllm.graph_tokens} tokens launch every "
            "kernel by hand) the best fit misses by "
            f"{100 * worst_ablated:.0f}%."
        )
        remarks.append(_ngram_remark(workload, rows))
    remarks.append(
        "Two free parameters for three points: a fit, not a prediction. The drop between k = 3 and 5 in the "
        "Think run (1.53 to 0.84) is steeper "
        "than arithmetic allows: "
        "six tokens a row instead of four can cost at most 1.5 times as much. A limit that the step runs "
        "into is needed, and vLLM's graph capture "
        "limit is one at the right place; "
        "that it was this limit is our guess."
    )
    return Section("NVIDIA's sweep of draft lengths", NVIDIA, tuple(checks), tuple(remarks))


def _ngram_remark(workload: str, rows: int, context: float = 2000.0) -> str:
    """n-gram drafting was slower than none although it accepted tokens: what its drafting must have cost."""
    accept, measured = NVIDIA_NGRAM[workload]
    shape = load_model("qwen3-8b")
    cost = StepCost(
        Deployment(load_hardware("gb200"), shape, ENGINES["vllm"], Precision(), Parallelism()), history()
    )
    plain, verify = cost.step(rows, 0, context), cost.step(rows, 3, context)
    missing = accept * plain / measured - verify
    return (
        f"{workload}, n-gram drafting (k = 3 assumed): accept length {accept:g} would give "
        f"{accept * plain / verify:.2f}x with drafting for free; "
        f"{measured:g}x was "
        f"measured. The missing term is the drafter's own time, {missing * 1e3:.0f} ms a step here; the "
        "model has it as a drafter's `fixed_seconds`."
    )


@dataclass(frozen=True)
class TltModel:
    """Qwen2.5-32B on 4 H100. Accept lengths come from the table's batch-1 row: four unknowns, four points."""

    scale_arithmetic: float = 1.0
    context: float = 4000.0

    @cached_property
    def cost(self) -> StepCost:
        hardware = load_hardware("h100")
        gemm, attention = hardware.kernels.gemm_bf16, hardware.kernels.attention
        kernels = dataclasses.replace(
            hardware.kernels,
            gemm_bf16=dataclasses.replace(gemm, flops=gemm.flops * self.scale_arithmetic),
            attention=dataclasses.replace(attention, flops=attention.flops * self.scale_arithmetic),
        )
        return cost_on(dataclasses.replace(hardware, kernels=kernels), "qwen2.5-32b", 4, ENGINES["paceline"])

    def plain(self, batch: int) -> float:
        return self.cost.step(batch, 0, self.context)

    def speculative(self, batch: int, tokens: int) -> float:
        return verify_seconds(self.cost, batch, tokens, self.context) + self.cost.draft_seconds(
            batch * TLT_TOPK, TLT_DEPTH
        )

    def accept_length(self, tokens: int) -> float:
        return TLT_SPEEDUP[1][tokens] * self.speculative(1, tokens) / self.plain(1)

    def checks(self) -> list[Check]:
        made = []
        for batch, row in TLT_SPEEDUP.items():
            for tokens, speedup in row.items():
                predicted = self.accept_length(tokens) * self.plain(batch) / self.speculative(batch, tokens)
                made.append(
                    Check(
                        f"batch {batch}, {tokens} verify tokens",
                        speedup,
                        predicted,
                        "x",
                        FIT if batch == 1 else PREDICTION,
                    )
                )
        return made

    def worst(self) -> float:
        return worst_error(predictions(self.checks()))


def tlt_batch_table() -> Section:
    model = TltModel()
    checks = model.checks()
    floor = (
        2
        * load_model("qwen2.5-32b").active_parameters
        * 32
        * 64
        / (4 * load_hardware("h100").data_sheet.bf16_flops)
    )
    plain = model.plain(32)
    small = [check for check in predictions(checks) if _tokens(check) <= 256]
    ablations = {
        "as it stands": TltModel(),
        "with twice the arithmetic rate": TltModel(scale_arithmetic=2.0),
        "with a context of 32,000, which makes the plain step dearer": TltModel(context=32000.0),
        "with both": TltModel(2.0, 32000.0),
    }
    remarks = (
        "Accept lengths are not given; those of the batch-1 row make it exact (a fit) and predict the other "
        "two rows. Context 4,000 assumed.",
        f"Up to 256 verified tokens a step the worst error is {100 * worst_error(small):.0f}%. Beyond, the "
        "misses grow with batch x verify tokens: "
        f"the term is the arithmetic of verification. 32 x 64 tokens need {floor * 1e3:.0f} ms on 4 H100 at "
        "100% of the data sheet's bf16 rate, "
        f"{floor / plain:.1f} plain steps of {plain * 1e3:.0f} ms; its 1.70x would then need an accept "
        f"length above {1.70 * floor / plain:.1f} with "
        f"drafting, attention and sampling free, where the batch-1 row gives {model.accept_length(64):.1f}.",
        "Ablation, worst error of the eight: "
        + "; ".join(f"{100 * ablated.worst():.0f}% {name}" for name, ablated in ablations.items())
        + ". So the last row needs more arithmetic than 4 H100 have at the assumed context, or fewer verified tokens than its column says.",
    )
    return Section("TLT: speed-up by batch and verify tokens (32B, TP4)", TLT, tuple(checks), remarks)


def _tokens(check: Check) -> int:
    """Verified in a step, from its name."""
    words = check.what.replace(",", "").split()
    return int(words[1]) * int(words[2])


def tlt_scenario(nodes: int, responses: int) -> Scenario:
    """Speculation below 33 running requests, as TLT does; lengths are assumed."""
    return Scenario(
        load_hardware("h100"),
        load_model("qwen2.5-7b"),
        8 * nodes,
        Parallelism(2),
        engine="vllm",
        workload=Workload(responses // 16, 16, 512, Lengths(4096, 1.0, 64, 32768)),
        speculation=Speculation(tuple(range(9)), Acceptance.from_accept_length(4.59, 8), 32),
    )


def tlt_nodes() -> Section:
    """One free parameter, the number of responses a step, from the figure on eight nodes; then one node."""
    candidates = (3072, 4096, 5120, 6144)
    on_eight = {n: ask(tlt_scenario(8, n)).step_speedup for n in candidates}
    responses = min(candidates, key=lambda n: abs(on_eight[n] - TLT_NODES[8]))
    one = ask(tlt_scenario(1, responses))
    checks = (
        Check("7B on 8 nodes: step speed-up", TLT_NODES[8], on_eight[responses], "x", FIT),
        Check("7B on 1 node: step speed-up", TLT_NODES[1], one.step_speedup, "x", PREDICTION),
    )
    always = dataclasses.replace(
        tlt_scenario(1, responses),
        speculation=Speculation(tuple(range(9)), Acceptance.from_accept_length(4.59, 8)),
    )
    remarks = (
        f"{responses} responses a step fit the first row; mean length 4,096 (log-normal, at most 32,768) and "
        "accept length 4.59 at depth 8 assumed.",
        "Why one node gains less: eight times the requests share a replica, so speculation (below 33 "
        "running) covers less of the rollout, and "
        "training is a larger share of the "
        "step. Choosing k by expected tokens per second at every batch size instead of a threshold gives "
        f"{ask(always).step_speedup:.2f}x on one "
        "node in the same model.",
    )
    return Section("TLT: end to end by nodes (7B)", TLT, checks, remarks)
