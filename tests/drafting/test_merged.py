"""Trees of two drafters: each path once, siblings that differ, and the same bits as plain decoding."""

import pytest
import torch

from paceline.config import load_config
from paceline.drafting.branches import BranchCalibration, merged_branches
from paceline.drafting.calibration import Calibration
from paceline.drafting.factory import DrafterFactory
from paceline.drafting.growth import GAP_PRIOR
from paceline.drafting.history import HistoryDrafter
from paceline.drafting.merged import (
    AGREED_PRIOR,
    BRANCH_PRIOR,
    FIRST_AGREED,
    FIRST_BRANCH,
    MergedDrafter,
    merged_candidates,
)
from paceline.kernels.tree_choice import ROOT, Candidates
from paceline.models.source import BUILTIN_POLICY
from paceline.pacing.strategy import Strategy
from paceline.plan.rollout import rollout_bytes
from paceline.policy.config import read_config
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy
from paceline.types import Request, SamplingParams
from tests.drafting.test_exactness import folders, plain_run, run  # noqa: F401
from tests.drafting.test_model_drafters import make_drafter
from tests.drafting.test_tree_choice import chosen_nodes
from tests.engine.test_engine import bits, grouped_requests
from tests.oracles import FAMILIES

CPU = torch.device("cpu")
RATES = Calibration([rate for rates in (*GAP_PRIOR, *BRANCH_PRIOR, *AGREED_PRIOR) for rate in rates], CPU)


def grown_at_random(generator: torch.Generator) -> Candidates:
    """Eagle's candidates of three depths: four below the root, four below one of them, and so on."""
    tokens, parents, values = [], [], []
    last, reach = ROOT, 0.0
    for _ in range(3):
        first = len(tokens)
        tokens += torch.randperm(6, generator=generator)[:4].tolist()
        parents += [last] * 4
        values += [reach - 0.3 * rank - 0.1 for rank in range(4)]
        last = first + int(torch.randint(0, 4, (), generator=generator))
        reach = values[last]
    return Candidates(
        torch.tensor([tokens]),
        torch.tensor([parents]),
        torch.tensor([values]),
        torch.tensor([[8 * (i % 4) + 2 for i in range(12)]]),
    )


def paths_of(candidates: Candidates) -> dict[tuple[int, ...], int]:
    """Returns the numbers of the candidates that exist by their paths, each of which must occur once."""
    found: dict[tuple[int, ...], int] = {}
    tokens, parents = candidates.tokens_RN[0].tolist(), candidates.parents_RN[0].tolist()
    for number, value in enumerate(candidates.values_RN[0].tolist()):
        if value == float("-inf"):
            continue
        path, node = [], number
        while node != ROOT:
            path.insert(0, tokens[node])
            node = parents[node]
        assert tuple(path) not in found and min(path) >= 0, path
        found[tuple(path)] = number
    return found


def test_each_path_is_there_once():
    generator = torch.Generator().manual_seed(0)
    agreed = 0
    for _ in range(60):
        grown = grown_at_random(generator)
        tokens_RCK = torch.randint(0, 6, (1, 5, 4), generator=generator)
        tokens_RCK[0, 4, 2:] = -1
        matched_RC = torch.tensor([[16, 9, 4, 4, 2]])
        branches = merged_branches(tokens_RCK, matched_RC, BranchCalibration(CPU))
        merged = merged_candidates(grown, branches, 4, 3, RATES.log_rates())
        ours, of_grown, of_branches = (paths_of(c) for c in (merged, grown, branches))
        assert set(ours) == set(of_grown) | set(of_branches)
        for path, number in ours.items():
            cell = int(merged.cells_RN[0, number])
            in_both = path in of_grown and path in of_branches
            assert (cell >= FIRST_AGREED) == in_both, path
            assert (cell < FIRST_BRANCH) == (path in of_grown and not in_both)
            agreed += in_both
        nodes = chosen_nodes(merged, 9)
        chosen = list(zip(nodes.parents_SK[0].tolist(), nodes.tokens_SK[0].tolist(), strict=True))
        assert len(set(chosen)) == 9, "siblings differ"
        assert all(parent <= i for i, (parent, _) in enumerate(chosen)), (
            "whoever is chosen has its parent before it"
        )
    assert agreed > 30


@pytest.mark.parametrize("family", ["qwen3", *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES)])
def test_same_bits_as_plain_decoding(family, folders):  # noqa: F811
    requests = grouped_requests(prompts=3, samples=3, longest=30)
    plain = plain_run(folders[family], requests)
    for strategy in (
        Strategy("history+eagle", 7, tree=True),
        Strategy("history+eagle", 2, tree=True, most=9),
    ):
        history, eagle = HistoryDrafter(bank_tokens=400), make_drafter("eagle", folders[family])
        merged = MergedDrafter(history, eagle)
        engine, done = run(
            folders[family], requests, [history, eagle, merged], strategy, shares=True, trees=True
        )
        assert bits(done) == bits(plain), strategy
        assert engine.take_stats().drafts["history+eagle"].drafts > 0
        assert merged.calibration.tried_C[:FIRST_BRANCH].sum() > 0
        assert torch.equal(eagle.calibration.tried_C, merged.calibration.tried_C[:FIRST_BRANCH]), "shared"


def test_an_untrained_head_does_history_little_harm(folders):  # noqa: F811
    """A second epoch of the same requests, which history knows."""
    free = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [Request(str(seed), tuple(range(5, 30)), seed, free) for seed in range(4)]
    accepted = {}
    for name in ("history", "history+eagle"):
        history, eagle = HistoryDrafter(), make_drafter("eagle", folders["llama"])
        drafters = [history, eagle, MergedDrafter(history, eagle)]
        engine, _ = run(folders["llama"], requests, drafters, Strategy(name, 9, tree=True), trees=True)
        engine.take_stats()
        engine.submit([Request(f"{r.id} again", r.prompt, r.seed, r.sampling) for r in requests])
        list(engine.completions())
        accepted[name] = engine.take_stats().drafts[name].accept_length
    # 6.7 and 8.0: the head gets nodes until its rates are known.
    assert accepted["history+eagle"] > 0.75 * accepted["history"] > 3, accepted


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_recipe_with_both_lets_them_draft_together(shape):
    drafters = "rollout.speculation.drafters=[history,eagle]"
    config = load_config(None, [drafters, f"rollout.speculation.shape={shape}"])
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    names = [drafter.name for drafter in DrafterFactory(config.rollout.speculation).make_all(policy)]
    assert names == ["history", "eagle", *(["history+eagle"] if shape == "tree" else [])]


def test_a_plan_counts_it_without_weights():
    config = load_config(
        None, ["rollout.speculation.drafters=[history,eagle]", "rollout.speculation.shape=tree"]
    )
    policy = Decoder(read_config(BUILTIN_POLICY), torch.bfloat16, torch.device("meta"))
    assert rollout_bytes(policy, config).graphs > 0
