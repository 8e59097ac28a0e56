"""A drafter's state, once handed out, is a copy: what is drafted, learned or rolled out later leaves it
alone.
"""

from dataclasses import replace

import pytest
import torch

import paceline.certify.closing_check as closing
from paceline.config import load_config
from paceline.drafting.history import HistoryDrafter
from paceline.pacing.strategy import Strategy
from paceline.policy.huggingface import load_policy
from paceline.session import open_session
from paceline.tasks.order import ProblemOrder
from paceline.types import Purpose, Request, SamplingParams
from tests.drafting.test_exactness import folders, run  # noqa: F401  (a fixture)
from tests.drafting.test_model_drafters import make_eagle


def requests(first: int) -> list[Request]:
    return [
        Request(str(i), (5, 6, 7, 8), i, SamplingParams(max_tokens=12, ignore_eos=True))
        for i in range(first, first + 3)
    ]


def test_history_state_is_unchanged_by_later_rollouts(folders):  # noqa: F811
    engine, _ = run(folders["llama"], requests(0), [HistoryDrafter(bank_tokens=60)], Strategy("history", 3))
    state = engine.drafter_state()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    engine.submit(requests(3))
    assert len(list(engine.completions())) == 3
    assert state.keys() == kept.keys() and all(torch.equal(state[name], kept[name]) for name in kept)
    later = engine.drafter_state()
    assert any(
        later[name].shape != kept[name].shape or not torch.equal(later[name], kept[name]) for name in kept
    ), "there was something to alias"


def test_eagle_head_state_is_unchanged_by_later_learning(folders):  # noqa: F811
    drafter = make_eagle(load_policy(folders["llama"], torch.float32))
    state = drafter.state()
    with torch.no_grad():
        for parameter in drafter.head.parameters():
            parameter.add_(1.0)
    parameters = dict(drafter.head.named_parameters())
    assert parameters and all(
        torch.equal(state[name] + 1.0, parameter) for name, parameter in parameters.items()
    )


@pytest.mark.parametrize("name", ["history", "eagle"])
def test_restored_trees_use_the_rates_that_were_learned(folders, name):  # noqa: F811
    """An engine that takes the state over proposes the trees that the first one would have."""

    def drafters():
        if name == "history":
            return [HistoryDrafter(bank_tokens=600)]
        return [make_eagle(load_policy(folders["llama"], torch.float32))]

    strategy = Strategy(name, 7, tree=True)
    first, _ = run(folders["llama"], requests(0), drafters(), strategy)
    state = first.drafter_state()
    later, _ = run(folders["llama"], [], drafters(), strategy)
    later.load_drafter_state(state)
    taken = later.drafter_state()
    assert state.keys() == taken.keys() and state[f"{name}.tree_counts"].any()
    assert all(torch.equal(state[key], taken[key]) for key in state)
    rates = [engine.drafters[name].calibration.log_rates() for engine in (first, later)]
    assert torch.equal(*rates)
    kept = rates[0].clone()
    first.submit([replace(request, purpose=Purpose.EVAL) for request in requests(0)])
    assert len(list(first.completions())) == 3
    assert not torch.equal(first.drafters[name].calibration.log_rates(), kept), "it learns meanwhile"
    assert torch.equal(first.drafter_state()[f"{name}.tree_counts"], state[f"{name}.tree_counts"])
    later.load_drafter_state({f"{name}.tree_counts": torch.zeros(2, 3)})
    assert torch.equal(later.drafters[name].calibration.log_rates(), kept), "other cells than these"
    later.load_drafter_state({"history+eagle.tree_counts": torch.ones(2, 60)})
    assert torch.equal(later.drafters[name].calibration.log_rates(), kept), "a drafter that there was once"


@pytest.mark.slow
def test_closing_check_never_drafts_from_the_answers_it_is_about_to_generate(monkeypatch):
    # The bank is full: what comes is written over what was.
    monkeypatch.setattr("paceline.drafting.history.BANK_TOKENS", 1200)
    overrides = ["drafters=[history]", "pacing=fixed", "tokens=5"]
    sizes = ["task.train_problems=4", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=8"]
    session = open_session(load_config("default", [*(f"rollout.speculation.{o}" for o in overrides), *sizes]))
    order = ProblemOrder(session.task.train, 0, 0)
    session.sampler.sample(order.take(4), Purpose.TRAIN, 1, 16, session.train_sampling())
    drafts, take = [], session.backend.take_stats

    def noting():
        stats = take()
        if "history" in stats.drafts:
            drafts.append((len(stats.running), stats.drafts["history"]))
        return stats

    noting()
    session.backend.take_stats = noting
    problems = ProblemOrder(session.task.train, 0, order.position).take(4)
    check = closing.check_speculation(
        session.backend,
        lambda: session.sampler.sample(problems, Purpose.TRAIN, 2, 8, session.train_sampling()),
        pairs=2,
    )
    session.close()
    assert check.identical and len(drafts) == 1 + len(check.paced) == 3
    assert all(d == drafts[1] for d in drafts[2:]), "no repetition knows more than the first, or less"
