"""Whether a head may learn beside a run: by default it takes no memory that the run would use."""

from collections.abc import Callable, Mapping

from paceline.config import Config
from paceline.plan.plan import Plan
from paceline.plan.suggestions import changed

# The KV pool may become so much smaller, by its tokens.
SMALLER_POOL = 0.9

NO_ROOM = (
    "the eagle head does not learn: the run needs the GPU's memory itself. With any key of "
    "rollout.speculation.online in the recipe, such as when=always, room is made for it"
)


# Plans of a run's GPUs, by what stands on them.
Plans = Mapping[str, Plan]


def settle_learning(config: Config, plans_of: Callable[[Config], Plans]) -> tuple[Config, Plans]:
    """Returns the recipe and its plans, without a head that learns where that would cost the run something.

    A recipe that asks for a head to learn gets it, whatever it costs.
    """
    plans = plans_of(config)
    learns = any(plan.bytes_of("drafter's optimiser") for plan in plans.values())
    if config.rollout.speculation.asks_to_learn or not learns:
        return config, plans
    frozen = changed(config, (("rollout.speculation.online.when", "never"),))
    without = plans_of(frozen)
    if any(_is_worse(plans[role], without[role]) for role in plans):
        return frozen, without
    return config, plans


def _is_worse(plan: Plan, without: Plan) -> bool:
    """Whether a run does not fit, or learns or generates more slowly, than `without` a head that learns."""
    if plan.problem or without.problem:
        return bool(plan.problem)
    recomputes = plan.recompute != without.recompute
    return recomputes or plan.sleeps > without.sleeps or plan.kv_tokens < SMALLER_POOL * without.kv_tokens
