"""Decides whether a head learns during a run: by default only in memory that the run would not use."""

from collections.abc import Callable, Mapping

from paceline.config import Config
from paceline.plan.plan import Plan
from paceline.plan.suggestions import changed

# Share of its tokens that the KV pool may lose.
SMALLER_POOL = 0.9

NO_ROOM = (
    "the eagle head does not learn: the run needs the GPU's memory itself. With any key of "
    "rollout.speculation.online in the recipe, such as share=0.02, room is made for it"
)


# Plans of a run's GPUs, by role.
Plans = Mapping[str, Plan]


def settle_learning(config: Config, plans_of: Callable[[Config], Plans]) -> tuple[Config, Plans]:
    """Returns the recipe and its plans, with learning of the head switched off where it would cost the run.

    A recipe that asks for a head to learn gets it at any cost.
    """
    plans = plans_of(config)
    learns = any(plan.bytes_of("drafter's optimiser") for plan in plans.values())
    if config.rollout.speculation.asks_to_learn or not learns:
        return config, plans
    frozen = changed(config, (("rollout.speculation.online.share", 0),))
    without = plans_of(frozen)
    if any(_is_worse(plans[role], without[role]) for role in plans):
        return frozen, without
    return config, plans


def _is_worse(plan: Plan, without: Plan) -> bool:
    """Returns whether a run does not fit, or is slower in either phase than `without` a learning head."""
    if plan.problem or without.problem:
        return bool(plan.problem)
    recomputes = plan.recompute != without.recompute
    return recomputes or plan.sleeps > without.sleeps or plan.kv_tokens < SMALLER_POOL * without.kv_tokens
