"""The speculation bench: same tokens under every strategy, figures that add up, and only full batches
counted.
"""

import pytest

from paceline.bench.setup import recipe_engine, recipe_policy, recipe_requests
from paceline.bench.speculation import _runs, bench_speculation, choose_long
from paceline.config import load_config
from paceline.pacing.strategy import Strategy


@pytest.mark.slow
def test_strategies_generate_the_same_and_figures_add_up():
    config = load_config("default", ["rollout.max_tokens=24", "task.train_problems=8"])
    policy, prompts = recipe_policy(config)
    candidates = recipe_requests(config, prompts, 24)
    alone = recipe_engine(config, policy, candidates, max_running=3)
    engines = [
        recipe_engine(config, policy, candidates, 3, "history", verify)
        for verify in ("shared-noise", "rejection")
    ]
    points = list(
        bench_speculation(
            alone,
            engines,
            candidates,
            [1, 3],
            [Strategy("history", 2), Strategy("history", 4)],
            repeats=1,
            rounds=3,
        )
    )
    classical = [p for p in points if p.strategy.endswith("rejection")]
    points = [p for p in points if p not in classical]
    assert [p.strategy for p in points] == ["plain", "plain, drafter on", "history:2", "history:4"] * 2
    assert len(classical) == 4 and all(p.identical is None for p in classical), (
        "rejection samples the same distribution, not the same tokens"
    )
    for p in points:
        assert p.identical == 1.0 and 1.0 <= p.accept_length <= 5.0
        assert p.tokens_per_second.median == pytest.approx(p.batch * p.accept_length / p.step_ms.median * 1e3)
        assert len(p.accepted_at) == (int(p.strategy[-1]) if p.strategy.startswith("history") else 0)
        assert p.accept_length == pytest.approx(1 + sum(p.accepted_at))
    strategy = Strategy("history", 4)
    chosen = choose_long(engines[1], candidates, 9, strategy)
    assert {r.id for r in chosen} != {r.id for r in choose_long(alone, candidates, 9)}, (
        "rejection's responses are others, and so are the long ones"
    )
    with pytest.raises(ValueError, match="25 requests are wanted; there are 24"):
        choose_long(alone, candidates, 25)


def test_a_drafter_that_remembers_has_not_seen_these_responses():
    config = load_config("default", ["rollout.max_tokens=24", "task.train_problems=8"])
    policy, prompts = recipe_policy(config)
    requests = recipe_requests(config, prompts, 4)
    engine = recipe_engine(config, policy, requests, 1, "history", "shared-noise")
    unused = {name: tensor.clone() for name, tensor in engine.drafter_state().items()}
    first, second = _runs(engine, unused, requests, 1, Strategy("history", 3), repeats=2)
    remembering = _runs(engine, engine.drafter_state(), requests, 1, Strategy("history", 3), repeats=1)[0]
    assert first.accept_length == second.accept_length < remembering.accept_length
