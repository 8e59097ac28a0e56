"""The planted bugs, layer by layer. Each names the check that must see it (`checks.py`)."""

from tests.certify.mutants import engine, sampling, steps, trees

MUTANTS = [*sampling.MUTANTS, *steps.MUTANTS, *trees.MUTANTS, *engine.MUTANTS]

# What each key of `checks.CHECKS` runs, for the reader.
WHAT = {
    "tokens": "every token of every setting, plain and speculating",
    "kernels": "sampler, rejection, noise and seeds by themselves",
    "preempted": "requests preempted on purpose",
    "long": "contexts of up to 4,096 tokens",
    "drawn": "settings, lengths and engines drawn at random",
    "chunks": "prefill in small chunks",
    "continued": "sequences continued in turns",
    "weights": "new weights in between",
    "endings": "stops and limits while speculating",
    "limit": "the last position",
    "asleep": "asleep between turns",
    "aborted": "some aborted",
    "experts": "every token, of a policy with experts",
    "rejection": "every token by rejection, draft model",
    "rejection, history": "every token by rejection, history drafter",
    "trees": "every token, in trees of a draft model",
    "fp8": "the FP8 policy",
    "fp8, weights": "the FP8 policy, new weights in between",
    "reference": "every token of the reference backend",
    "reference, weights": "the reference backend, new weights in between",
}


def table() -> str:
    """Returns the planted bugs as a table, with what catches each."""
    lines = ["| package | planted bug | caught by |", "|---|---|---|"]
    for mutant in MUTANTS:
        by = WHAT.get(mutant.caught_by, f"`{mutant.caught_by}`")
        lines.append(f"| `{mutant.layer}` | {mutant.name} | {by} |")
    return "\n".join(lines)
