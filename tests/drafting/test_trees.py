"""Trees give the same bits as plain decoding, whoever proposes them and whichever way they branch."""

import random

import pytest
import torch

from paceline.drafting.base import Drafter
from paceline.pacing.strategy import Strategy
from paceline.types import Completion, Request
from tests.drafting.test_exactness import OracleDrafter, RandomDrafter, folders, run  # noqa: F401
from tests.drafting.test_model_drafters import make_drafter
from tests.engine.test_engine import bits, grouped_requests
from tests.oracles import FAMILIES

VOCABULARY = 97


class BranchingDrafter(Drafter):
    """Random trees that hold the right answer more or less far, at a random place among wrong siblings."""

    name = "branching"
    max_tokens = 15

    def __init__(self, answers: dict[str, Completion], right: float = 0.8, missing: float = 0.1) -> None:
        self.answers = answers
        self.right = right
        self.missing = missing
        self.rng = random.Random(0)
        self.requests: dict[int, Request] = {}

    def observe_enter(self, slot: int, request: Request, handover: torch.Tensor | None) -> None:
        self.requests[slot] = request

    def propose_tree(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        for slot in slots_R.tolist():
            if slot in self.requests and bool(self.context.rows.active[slot]):
                tokens, parents = self.tree(slot, count)
                self.context.proposals_SK[slot, :count] = torch.tensor(tokens)
                self.context.parents_SK[slot, :count] = torch.tensor(parents)

    def tree(self, slot: int, count: int) -> tuple[list[int], list[int]]:
        request = self.requests[slot]
        start = int(self.context.rows.length[slot]) - len(request.prompt)
        answer = self.answers[request.id].tokens[start:]
        tokens, parents = [], []
        path = [0]  # the nodes that say what will be sampled
        for node in range(1, count + 1):
            depth = len(path) - 1
            if depth < len(answer) and self.rng.random() < self.right * 0.6:
                tokens.append(answer[depth])
                parents.append(path[-1])
                path.append(node)
            elif self.rng.random() < self.missing:
                tokens.append(-1)
                parents.append(self.rng.randrange(node))
            else:
                parent = self.rng.randrange(node)
                wrong = set(range(VOCABULARY)) - {
                    t for t, p in zip(tokens, parents, strict=True) if p == parent
                }
                if parent in path and path.index(parent) < len(answer):
                    wrong -= {answer[path.index(parent)]}
                tokens.append(self.rng.choice(sorted(wrong)))
                parents.append(parent)
        return tokens, parents


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 4, 15])
def test_any_tree_gives_the_same_bits(family, count, folders):  # noqa: F811
    requests = grouped_requests(prompts=4, samples=3, longest=50)
    _, plain = run(folders[family], requests)
    for drafter in (BranchingDrafter(plain), RandomDrafter(), OracleDrafter(plain)):
        engine, done = run(folders[family], requests, [drafter], Strategy(drafter.name, count, tree=True))
        assert bits(done) == bits(plain), drafter.name
        if drafter.name == "branching" and count == 15:
            assert engine.take_stats().drafts["branching"].accept_length > 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["eagle", "draft_model"])
def test_grown_trees_give_the_same_bits(family, kind, folders):  # noqa: F811
    requests = grouped_requests(prompts=4, samples=3, longest=40)
    _, plain = run(folders[family], requests)
    for count in (1, 3, 7, 15):
        drafter = make_drafter(kind, folders[family])
        _, done = run(folders[family], requests, [drafter], Strategy(kind, count, tree=True))
        assert bits(done) == bits(plain), count
