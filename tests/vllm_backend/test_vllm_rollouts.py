"""A real vLLM on the CPU as a run's generator: weights, heads, faults, learning.

It lives in an environment of its own (`scripts/vllm_env.sh` makes it). Starting it takes longer than most of
what is tested, so that the tests share two processes.
"""

import json
import os
import signal
import time

import pytest
import torch

from paceline.certify.foreign_run import Foreign, certify_foreign
from paceline.config import load_config
from paceline.drafting.eagle_folder import BUILTIN_EAGLE, load_eagle
from paceline.loop import train
from paceline.policy.attention import PackedAttention
from paceline.policy.huggingface import load_policy
from paceline.policy.tokenizer import load_tokenizer
from paceline.session import Session, open_session
from paceline.types import Completion, FinishReason, Request, SamplingParams
from tests.peers.test_vllm import VENV
from tests.peers.test_vllm import pytestmark as vllm_marks

pytestmark = vllm_marks

# Two logits closer than this are a tie that rounding decides.
TIE = 1e-3

PYTHON = f"rollout.vllm.python={VENV / 'bin' / 'python'}"
PLAIN = ["rollout.backend=vllm", PYTHON, "rollout.max_running=64", "rollout.speculation.drafters=[]"]
EAGLE = [
    *PLAIN,
    "rollout.speculation.drafters=[eagle]",
    "rollout.speculation.pacing=fixed",
    "rollout.speculation.verify=rejection",
    "rollout.speculation.tokens=3",
]


def opened(overrides: list[str]) -> Session:
    session = open_session(load_config("default", overrides))
    session.backend.update_weights(0)
    return session


@pytest.fixture(scope="module")
def plain():
    session = opened(PLAIN)
    yield session
    session.close()


def prompts(session: Session, count: int) -> list[tuple[int, ...]]:
    """Problems with the first term of a careful answer, after which responses are long."""
    texts = [problem.prompt for problem in session.task.train[:count]]
    return [tuple(session.tokenizer.encode(f"{text}{text[:2]}:").ids) for text in texts]


def requests(session: Session, count: int, label: str, **sampling: object) -> list[Request]:
    params = SamplingParams(**({"max_tokens": 60} | sampling))
    return [Request(f"{label}/{i}", p, i, params) for i, p in enumerate(prompts(session, count))]


@torch.no_grad()
def disturb(session: Session, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in session.policy.parameters():
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.std() * scale)


@torch.no_grad()
def disagreements(session: Session, completion: Completion) -> list[int]:
    """The places where a greedy response is not what the learner's policy would choose, ties aside."""
    text = [*completion.request.prompt, *completion.tokens]
    packed = PackedAttention([len(text)], session.policy.device)
    policy = session.policy
    first = len(completion.request.prompt) - 1
    logits_TV = policy.logits(policy(torch.tensor(text), packed.positions_T, packed))[first:-1]
    best_T = logits_TV.max(-1).values
    chosen_T = logits_TV.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
    return [i for i, gap in enumerate((best_T - chosen_T).tolist()) if gap > TIE]


def test_greedy_tokens_after_an_update_are_the_learners(plain):
    """Also with prompts whose cache the old weights filled."""
    before = requests(plain, 12, "before", temperature=0.0)
    plain.backend.submit(before)
    old = {c.request.prompt: c.tokens for c in plain.backend.completions()}
    disturb(plain, 0.2)
    plain.backend.update_weights(1)
    plain.backend.submit(requests(plain, 12, "after", temperature=0.0))
    after = list(plain.backend.completions())
    assert any(old[c.request.prompt] != c.tokens for c in after), "the new weights change nothing"
    for completion in after:
        assert not disagreements(plain, completion)
        assert {segment.weight_version for segment in completion.segments} == {1}
    assert plain.backend.probed < 1e-4


def test_response_across_an_update_has_a_segment_for_each_version(plain):
    plain.backend.update_weights(1)  # another process may have run the test before
    for version in range(2, 7):
        short = requests(plain, 1, f"short{version}", max_tokens=4, ignore_eos=True)
        long = requests(plain, 12, f"crossing{version}", max_tokens=200, ignore_eos=True)
        plain.backend.submit([*short, *long])
        first = next(plain.backend.completions())
        plain.backend.update_weights(version)
        done = list(plain.backend.completions())
        assert first.request.id == short[0].id and len(done) == 12
        across = [completion for completion in done if len(completion.segments) > 1]
        if across:
            break  # else this process paused until all of them had ended: once more
    assert across, "all of them had ended before"
    for completion in across:
        assert [segment.weight_version for segment in completion.segments] == [version - 1, version]
        assert completion.segments[-1].stop == len(completion.tokens) == 200


def test_killed_worker_is_replaced_and_every_sample_ends_once(plain):
    soon = requests(plain, 1, "soon", max_tokens=4, ignore_eos=True)
    plain.backend.submit([*soon, *requests(plain, 40, "killed", max_tokens=120, ignore_eos=True)])
    assert next(plain.backend.completions()).request.id == "soon/0"
    os.kill(plain.backend.replicas[0].worker.id, signal.SIGKILL)
    done = list(plain.backend.completions())
    deadline = time.monotonic() + 120
    while not plain.backend.restarts and time.monotonic() < deadline:
        time.sleep(0.01)  # the last of them may be here before the news
    assert plain.backend.restarts == 1
    assert sorted(c.request.id for c in done) == sorted(f"killed/{i}" for i in range(40))
    assert all(len(c.tokens) == 120 and c.finish_reason is FinishReason.LENGTH for c in done)
    # The worker that took over has the newest weights, not the folder's.
    plain.backend.submit(requests(plain, 4, "taken over", temperature=0.0))
    for completion in plain.backend.completions():
        assert not disagreements(plain, completion)


def accept_length(session: Session, label: str) -> float:
    session.backend.take_stats()
    session.backend.submit(requests(session, 24, label, temperature=0.0))
    assert len(list(session.backend.completions())) == 24
    return session.backend.take_stats().drafts["eagle"].accept_length


def test_published_head_raises_acceptance_and_leaves_the_policy_alone():
    """It starts as a head that shares its LM head with the policy, which vLLM would alias."""
    learns = ["rollout.speculation.eagle_path=fresh"]
    session = opened([*EAGLE, *learns])
    try:
        trained = load_eagle(BUILTIN_EAGLE, session.policy, torch.float32)
        before = accept_length(session, "fresh")
        session.backend.speculation.publish_drafter(1, dict(trained.named_parameters()))
        session.backend._compare(session.backend.probe, 1)
        after = accept_length(session, "trained")
        assert after > before + 0.5
        session.backend.update_weights(2)
        assert accept_length(session, "updated") == pytest.approx(after, rel=0.05)
    finally:
        session.close()


@pytest.mark.ci
def test_builtin_run_with_vllm_learns_and_its_generator_is_certified(tmp_path):
    """A short one; `benchmarks/vllm_learns.sh` compares whole ones with native runs, over three seeds."""
    own = [f"run.root={tmp_path}", "run.name=run", "run.steps=6", "eval.problems=96"]
    assert train(load_config("default", [*PLAIN, *own])).finished
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    before, after = (record["eval/accuracy"] for record in records if record["kind"] == "eval")
    steps = [record for record in records if record["kind"] == "train"]
    assert after > before + 0.15
    assert all(record["policy/largest_logprob_delta"] < 1e-3 for record in steps)
    assert len(steps) == 6 and all(record["rollout/samples"] == 128 for record in steps)
    learned = tmp_path / "run/checkpoints/step_000006/policy"
    policy, tokenizer = load_policy(learned, torch.float32), load_tokenizer(learned)
    texts = [tuple(tokenizer.encode(text).ids) for text in ("a9b8c8=", "a5b0c7d3=", "a3")]
    what = Foreign(str(learned), (PYTHON,), "default")
    certificate = certify_foreign(what, policy, texts, tokenizer, quick=True, samples=100)
    assert certificate.passed, certificate.table()
