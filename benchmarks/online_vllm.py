"""What vLLM accepts of an eagle head's drafts along greedy responses to a recipe's held-out problems.

    python benchmarks/online_vllm.py RECIPE policy.path=POLICY rollout.speculation.eagle_path=HEAD \
        rollout.vllm.python=VLLM_PYTHON rollout.speculation.tokens=5

`paceline drafter eval --temperature 0` reports the same for our engine.
"""

import math
import sys
from collections.abc import Sequence

from paceline.bench.setup import recipe_tokenizer
from paceline.config import Config, load_config
from paceline.device import prepare_device
from paceline.models.source import policy_dtype, policy_folder
from paceline.policy.huggingface import load_policy
from paceline.stats import DraftStats
from paceline.tasks import make_task
from paceline.types import Request, SamplingParams
from paceline.vllm_backend.start import start_vllm

NEEDED = (
    "rollout.backend=vllm",
    "rollout.speculation.drafters=[eagle]",
    "rollout.speculation.pacing=fixed",
    "rollout.speculation.verify=rejection",
)
PROBLEMS = 512


def held_out_requests(config: Config) -> list[Request]:
    folder = policy_folder(config.policy.path)
    task = make_task(config.task, recipe_tokenizer(config), folder)
    prompts = [task.prompts.encode(problem) for problem in task.held_out[:PROBLEMS]]
    task.close()
    sampling = SamplingParams(max_tokens=config.rollout.max_tokens, temperature=0.0)
    return [Request(str(number), prompt, 0, sampling) for number, prompt in enumerate(prompts)]


def mean_and_error(reached: Sequence[int], drafts: int) -> tuple[float, float]:
    """Returns the mean accept length and its standard error, from how many drafts got to each place."""
    mean = sum(reached) / drafts
    square = sum((2 * place + 1) * count for place, count in enumerate(reached)) / drafts
    return 1 + mean, math.sqrt((square - mean**2) / drafts)


def main() -> None:
    recipe, *overrides = sys.argv[1:]
    config = load_config(recipe, [*NEEDED, *overrides])
    requests = held_out_requests(config)
    device = prepare_device(config)
    policy = load_policy(policy_folder(config.policy.path), policy_dtype(config.policy, device), device)
    backend = start_vllm(policy, recipe_tokenizer(config), config, lambda text: print(text, file=sys.stderr))
    backend.take_stats()
    backend.submit(requests)
    tokens = sum(len(completion.tokens) for completion in backend.completions())
    drafts: DraftStats = backend.take_stats().drafts["eagle"]
    backend.close()
    mean, error = mean_and_error(drafts.accepted_at, drafts.drafts)
    responses = f"{len(requests)} responses, {tokens} tokens, {drafts.drafts} drafts"
    print(f"{responses}: accept length {mean:.3f} (standard error {error:.3f})")


if __name__ == "__main__":
    main()
