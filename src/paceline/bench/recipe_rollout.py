"""Whole rollouts of a recipe: its policy, prompts, drafters, pacer, precision and lengths, as a run has them.

Lengths are those of the policy's own responses. Drafters are reset before each rollout: one
that remembers responses would find these very ones.
"""

from paceline.bench.rollout import RolloutPoint, measure_rollouts
from paceline.bench.setup import recipe_requests, recipe_tokenizer
from paceline.config import Config
from paceline.engine.engine import Engine
from paceline.engine.factory import make_engine
from paceline.engine.reservation import RESERVED_STEPS
from paceline.engine.rows import MAX_QUERY
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
