"""An exported eagle head in a real vLLM: it loads as `eagle3`, and vLLM accepts of its drafts what `drafter eval` says.

Greedy, the two must agree draft by draft. At temperature 1 vLLM's noise is its own, so only the rate is compared, by rejection
sampling with draft probabilities (its default drafts greedily, which no drafter of ours does at temperature 1).
"""

import pytest
import torch

from paceline.config import load_config
from paceline.drafting.acceptance import measure_acceptance
from paceline.drafting.eagle_folder import BUILTIN_EAGLE, load_eagle, save_eagle
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.responses import held_out_responses
from paceline.drafting.training import HeadTraining, choose_vocabulary, train_offline
from paceline.learning.batch import training_sequence
from paceline.session import BUILTIN_POLICY, open_session
from tests.peers.test_vllm import pytestmark as vllm_marks
from tests.peers.test_vllm import run_vllm

pytestmark = vllm_marks
DEPTH, PROMPTS, MAX_TOKENS = 5, 48, 288


@pytest.fixture(scope="module")
def session():
    session = open_session(load_config("default", ["run.device=cpu"]))
    yield session
    session.close()


def prompts_of(session) -> list[list[int]]:
    return [list(session.task.prompts.encode(problem)) for problem in session.task.held_out[:PROMPTS]]


def accept_length(answer: dict) -> float:
    """vLLM's first token of a response comes from the prefill, without a draft."""
    return (sum(map(len, answer["tokens"])) - len(answer["tokens"])) / answer["drafts"]


def test_the_shipped_head_in_vllm(session, tmp_path):
    head = load_eagle(BUILTIN_EAGLE, session.policy, torch.float32)
    save_eagle(head, tmp_path / "exported", torch.float32)
    job = dict(
        policy=str(BUILTIN_POLICY), drafter=str(tmp_path / "exported"), depth=DEPTH, temperatures=[0.0, 1.0], max_tokens=MAX_TOKENS,
        prompts=prompts_of(session), settings={"draft_sample_method": "probabilistic"},
    )  # fmt: skip
    answers = run_vllm(job, tmp_path, "vllm_speculate.py")

    greedy = held_out_responses(session, PROMPTS, 0.0)
    ours = measure_acceptance(session.policy, head, greedy, DEPTH, known=1).shared_noise
    assert answers["0.0"]["tokens"] == [list(completion.tokens) for completion in greedy]
    assert accept_length(answers["0.0"]) == pytest.approx(ours.accept_length, rel=0.01)

    ours = measure_acceptance(session.policy, head, held_out_responses(session, 4 * PROMPTS, 1.0), DEPTH, known=1).rejection
    assert accept_length(answers["1.0"]) == pytest.approx(ours.accept_length, rel=0.15)


def test_a_reduced_vocabulary_in_vllm(session, tmp_path):
    """Its map must mean the same there: a token beside the right one would never be accepted."""
    policy = session.policy
    greedy = held_out_responses(session, PROMPTS, 0.0)
    sequences = [training_sequence(completion) for completion in greedy]
    head = EagleHead(config_for(policy.config, captured_layers=(2, 4, 5), draft_vocab=30))
    ids = choose_vocabulary(sequences, policy.config.vocab_size, policy.config.eos_token_ids, 30)
    head.draft_to_target.copy_(torch.tensor(ids))
    train_offline(policy, head.initialise(policy, 0), sequences, HeadTraining(steps=60, lr=3e-3, unroll=2))
    save_eagle(head, tmp_path / "exported")
    job = dict(
        policy=str(BUILTIN_POLICY), drafter=str(tmp_path / "exported"), depth=3, temperatures=[0.0], max_tokens=MAX_TOKENS,
        prompts=prompts_of(session), settings={},
    )  # fmt: skip
    answer = run_vllm(job, tmp_path, "vllm_speculate.py")["0.0"]
    ours = measure_acceptance(policy, head, greedy, 3, known=1).shared_noise
    assert answer["tokens"] == [list(completion.tokens) for completion in greedy]
    assert accept_length(answer) == pytest.approx(ours.accept_length, rel=0.01) and ours.accept_length > 1.3
