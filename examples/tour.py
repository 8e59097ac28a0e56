"""A tour of Paceline in cells: open it as a notebook (`# %%`), or run it whole, about a minute on a CPU.

python examples/tour.py
python examples/tour.py run.steps=5        # overrides apply to the runs of this tour
"""

# %% The built-in policy: 0.9 M parameters, answers `a9b8c8=` either with a guess or with running sums
import json
import sys
from pathlib import Path

import paceline

OVERRIDES = [argument for argument in sys.argv[1:] if "=" in argument]

policy = paceline.load("builtin")
for text in policy.generate(["a9b8c8="], samples=4, seed=7)[0]:
    print(text)

# %% Noise is a function of (seed, position, token), so a text does not depend on what it was sampled beside
alone = policy.generate(["a9b8c8="], samples=1, seed=7)[0][0]
in_company = policy.generate(["a9b8c8=", "a1b2c3d4="], samples=4, seed=7)[0][0]
assert alone == in_company

# %% A recipe is a YAML file and overrides; every key is checked, and a wrong one names the nearest match
config = paceline.load_config("default", ["run.steps=2", "learning.lr=1e-4"])
print(config.rollout.speculation)
try:
    paceline.load_config("default", ["learning.lrr=1e-4"])
except ValueError as error:
    print("error:", error)


# %% A run: roll out, score, learn; `drafters` propose tokens, and the policy's own samples decide
def train(*changes: str) -> list[dict]:
    """Runs a short training and returns the records of its training steps."""
    small = ["run.steps=2", "rollout.prompts_per_step=8", "eval.problems=16"]
    result = paceline.train(paceline.load_config("default", [*small, *changes, *OVERRIDES]), quiet=False)
    lines = (Path(result.summary.run) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


speculative = train("rollout.speculation.pacing=fixed", "rollout.speculation.drafters=[eagle]")

# %% The same run without speculation samples the same tokens, so it learns the same thing, to the last bit
plain = train("rollout.speculation.drafters=[]")
for ours, theirs in zip(speculative, plain, strict=True):
    print(f"step {ours['step']}: {theirs['rollout/decode_steps']:.0f} decode steps plain, ", end="")
    print(f"{ours['rollout/decode_steps']:.0f} speculative")
    for name in ("reward/mean", "rollout/tokens", "policy/loss", "policy/gradient_norm"):
        assert ours[name] == theirs[name], name

# %% Where to go on: docs/tasks.md for your own task, docs/drafters.md for drafters, `paceline plan`
print("rewards, tokens, losses and gradients were identical")
