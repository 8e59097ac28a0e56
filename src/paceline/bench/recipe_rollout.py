"""Whole rollouts of a recipe: its policy, prompts, drafters, pacer, precision and lengths, as a run has them.

Lengths are those of the policy's own responses. Before each rollout drafters forget what they have seen: one
that remembers responses would find these very ones.
"""

from collections.abc import Callable

from paceline.bench.pacing import PacingPoint, PacingResult, bench_pacing
from paceline.bench.rollout import RolloutPoint, measure_rollouts
from paceline.bench.setup import recipe_requests, recipe_tokenizer
from paceline.config import Config, ConfigError
from paceline.engine.engine import Engine
from paceline.engine.factory import make_engine
from paceline.engine.reservation import RESERVED_STEPS
from paceline.engine.rows import MAX_QUERY
from paceline.pacing.adaptive import AdaptivePacer
from paceline.pacing.strategy import Strategy
from paceline.policy.decoder import Decoder
from paceline.types import Request

Prompts = list[tuple[int, ...]]


def rollout_engine(config: Config, policy: Decoder, requests: list[Request]) -> Engine:
    """Returns the recipe's engine, with a pool that holds all that may run unless the recipe sizes it."""
    longest = max(len(request.prompt) + request.sampling.max_tokens for request in requests)
    running = min(config.rollout.max_running, len(requests))
    rollout = config.rollout.model_copy(update={"max_running": running})
    kv_tokens = rollout.kv_tokens or running * (longest + RESERVED_STEPS * (MAX_QUERY + 1))
    tokenizer = recipe_tokenizer(config)
    return make_engine(policy, rollout, kv_tokens, tokenizer, request_tokens=longest)


def bench_recipe_rollout(
    config: Config, policy: Decoder, prompts: Prompts, requests: int, repeats: int
) -> RolloutPoint:
    """Measures a rollout under the recipe's own pacer, or plainly if it has no drafters."""
    wanted = recipe_requests(config, prompts, requests)
    return measure_rollouts(rollout_engine(config, policy, wanted), wanted, repeats)


def bench_recipe_pacing(
    config: Config,
    policy: Decoder,
    prompts: Prompts,
    requests: int,
    fixed_tokens: list[int],
    rollouts: int,
    progress: Callable[[PacingPoint], None],
) -> PacingResult:
    """Measures a rollout plainly, with each drafter and number of tokens, and with the recipe's pacer."""
    wanted = recipe_requests(config, prompts, requests)
    engine = rollout_engine(config, policy, wanted)
    if not isinstance(engine.pacer, AdaptivePacer):
        raise ConfigError(
            f"rollout.speculation.drafters = {config.rollout.speculation.drafters}, pacing = "
            f"{config.rollout.speculation.pacing!r}: `bench pacing` measures an adaptive pacer; name "
            "drafters that this policy has with rollout.speculation.pacing=adaptive, or use `bench rollout`"
        )
    tree = config.rollout.speculation.shape == "tree"
    fixed = [
        Strategy(drafter.name, count, tree)
        for drafter in engine.drafters.values()
        for count in fixed_tokens
        if count <= min(drafter.max_tokens, config.rollout.speculation.tokens)
    ]
    return bench_pacing(engine, wanted, fixed, engine.pacer, rollouts, progress=progress)
