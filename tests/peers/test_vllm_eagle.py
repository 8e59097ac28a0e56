"""An exported eagle head in a real vLLM: it loads as `eagle3`, and vLLM accepts of its drafts what `drafter
eval` says.

Greedy, where the two must agree draft by draft. At temperature 1 vLLM 0.32's CPU build by itself cannot be
compared with: it verifies at a temperature that it never wrote (docs/vllm.md).
"""

import pytest
import torch

from paceline.drafting.acceptance import Acceptance, measure_acceptance
from paceline.drafting.eagle_folder import BUILTIN_EAGLE, load_eagle, save_eagle
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.engine.engine import Engine, EngineSettings
from paceline.models.source import BUILTIN_POLICY
from paceline.policy.huggingface import load_policy
from paceline.policy.tokenizer import load_tokenizer
from paceline.tasks.running_sums import RunningSums
from paceline.types import Completion, Request, SamplingParams
from tests.peers.test_vllm import pytestmark as vllm_marks
from tests.peers.test_vllm import run_vllm

pytestmark = vllm_marks
DEPTH, MAX_TOKENS = 5, 288


def prompts() -> list[list[int]]:
    """Problems with the first term of a careful answer: by itself the policy, greedy, would guess and be
    done.
    """
    tokenizer = load_tokenizer(BUILTIN_POLICY)
    texts = [problem.prompt for problem in RunningSums(0, 96, 48).held_out]
    return [tokenizer.encode(f"{text}{text[:2]}:").ids for text in texts]


@pytest.fixture(scope="module")
def policy():
    return load_policy(BUILTIN_POLICY, torch.float32)


@pytest.fixture(scope="module")
def greedy(policy) -> list[Completion]:
    engine = Engine(policy, EngineSettings(max_running=16, kv_tokens=16384))
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    engine.submit(
        [Request(str(i), tuple(prompt), seed=i, sampling=sampling) for i, prompt in enumerate(prompts())]
    )
    return sorted(engine.completions(), key=lambda completion: int(completion.request.id))


def in_vllm_and_here(policy, head: EagleHead, greedy: list[Completion], scratch) -> tuple[float, Acceptance]:
    """vLLM's accept length, and ours: its first token of a response comes from the prefill, without a
    draft.
    """
    save_eagle(head, scratch / "exported", torch.float32)
    job = dict(
        policy=str(BUILTIN_POLICY),
        drafter=str(scratch / "exported"),
        depth=DEPTH,
        temperatures=[0.0],
        max_tokens=MAX_TOKENS,
        prompts=prompts(),
        settings={},
    )
    answer = run_vllm(job, scratch, "vllm_speculate.py")["0.0"]
    assert answer["tokens"] == [list(completion.tokens) for completion in greedy]
    theirs = (sum(map(len, answer["tokens"])) - len(greedy)) / answer["drafts"]
    return theirs, measure_acceptance(policy, head, greedy, DEPTH, known=1).shared_noise


def test_vllm_accepts_the_shipped_heads_drafts(policy, greedy, tmp_path):
    theirs, ours = in_vllm_and_here(
        policy, load_eagle(BUILTIN_EAGLE, policy, torch.float32), greedy, tmp_path
    )
    assert theirs == pytest.approx(ours.accept_length, rel=0.01) and theirs > 5


def test_vllm_accepts_drafts_of_a_reduced_vocabulary(policy, greedy, tmp_path):
    """Its map must mean the same there: a token beside the right one would never be accepted."""
    whole = load_eagle(BUILTIN_EAGLE, policy, torch.float32)
    head = EagleHead(config_for(policy.config, whole.config.captured_layers, draft_vocab=30))
    kept = torch.tensor([i for i in range(48) if i not in range(5, 23)])  # without some digits and labels
    head.load_state_dict(
        whole.state_dict() | {"head.weight": whole.head.weight.detach()[kept], "draft_to_target": kept}
    )
    theirs, ours = in_vllm_and_here(policy, head, greedy, tmp_path)
    assert theirs == pytest.approx(ours.accept_length, rel=0.01) and 1.5 < theirs < 4
