"""Distillation against loops over tokens in float64: divergences, gradients, a teacher behind a server."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from paceline.config import ConfigError, load_config
from paceline.learning.algorithms.distill import Distill
from paceline.learning.learner import Learner
from paceline.learning.teacher import divergence
from paceline.policy.attention import PackedAttention
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import save_policy
from tests.learning.samples import make_config, make_groups, make_policy, response_logprobs, watch_gradients
from tests.learning.test_algorithms import clipped, group_advantages

KINDS = ("reverse", "forward", "mixed")


def by_hand(p: list[float], q: list[float], kind: str) -> float:
    """The divergence of two distributions, outcome by outcome."""

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    mean = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    found = {"reverse": kl(p, q), "forward": kl(q, p), "mixed": (kl(p, mean) + kl(q, mean)) / 2}
    return found[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [0, 3])
def test_divergence_is_that_of_the_two_distributions(kind, top_k):
    log_p, log_q = (torch.randn(4, 9, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    found = divergence(log_p, log_q, kind, top_k)
    for row in range(4):
        p, q = log_p[row].exp().tolist(), log_q[row].exp().tolist()
        if top_k:  # all but the teacher's likeliest are one outcome
            kept = sorted(range(9), key=lambda i: q[i], reverse=True)[:top_k]
            p, q = ([x[i] for i in kept] + [1 - sum(x[i] for i in kept)] for x in (p, q))
        assert found[row].item() == pytest.approx(by_hand(p, q, kind), rel=1e-9)


def make_teacher(folder, seed: int = 3) -> Decoder:
    teacher = make_policy(seed)
    save_policy(teacher, folder)
    return teacher


def config(folder, *overrides):
    return make_config("learning.algorithm=distill", f"learning.distill.teacher={folder}", *overrides)


def distributions(policy: Decoder, completion) -> torch.Tensor:
    """Returns log pi of every token of the vocabulary where a response token is predicted."""
    prompt = completion.request.prompt
    tokens = torch.tensor(prompt + completion.tokens)
    attention = PackedAttention([len(tokens)], torch.device("cpu"))
    logits = policy.logits(policy(tokens, attention.positions_T, attention))
    return (logits / completion.request.sampling.temperature).log_softmax(-1)[len(prompt) - 1 : -1]


def loss_by_hand(policy, teacher, groups, kind, reward_weight):
    losses = []
    for group in groups:
        for sample, advantage in zip(group.samples, group_advantages(group), strict=True):
            completion = sample.completion
            log_p, log_q = distributions(policy, completion), distributions(teacher, completion).detach()
            new = response_logprobs(policy, completion)
            mean = torch.log((log_p.exp() + log_q.exp()) / 2)
            reverse, forward = log_p.exp() * (log_p - log_q), log_q.exp() * (log_q - log_p)
            mixed = (log_p.exp() * (log_p - mean) + log_q.exp() * (log_q - mean)) / 2
            each = {"reverse": reverse, "forward": forward, "mixed": mixed}[kind].sum(-1)
            for t in (t for t, sampled in enumerate(completion.loss_mask) if sampled):
                ratio = (new[t] - completion.logprobs[t]).exp()
                losses.append(each[t] + reward_weight * clipped(ratio, advantage, 0.2, 0.2))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget, reward_weight", [(4096, 0.0), (64, 0.5)])
def test_distillation_loss_and_gradients_follow_the_formula(
    kind, budget, reward_weight, tmp_path, monkeypatch
):
    """Alone and beside rewards, however the step is cut into micro-batches and rows into chunks."""
    monkeypatch.setattr("paceline.learning.teacher.CHUNK_ELEMENTS", 31 * 7)
    teacher = make_teacher(tmp_path)
    overrides = (f"learning.distill.kl={kind}", f"learning.distill.reward_weight={reward_weight}")
    policy, expected_policy, groups = make_policy(), make_policy(), make_groups()
    learner = Learner(policy, config(tmp_path, f"learning.micro_batch_tokens={budget}", *overrides))
    expected = loss_by_hand(expected_policy, teacher, groups, kind, reward_weight)
    expected.backward()
    gradients = watch_gradients(learner)
    metrics = learner.update(groups)
    assert metrics["policy/loss"] == pytest.approx(expected.item(), rel=1e-9)
    for name, parameter in expected_policy.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-12, msg=name)
    assert metrics["policy/reference_kl"] > 0 and metrics["policy/skipped"] == 0


def test_distillation_learns_where_all_rewards_are_equal_and_ends_at_the_teacher(tmp_path):
    """The teacher is signal enough; a policy that is the teacher has nothing to learn."""
    teacher = make_teacher(tmp_path)
    groups = make_groups()
    for group in groups:
        for sample in group.samples:
            object.__setattr__(sample.score, "reward", 1.0)
    learner = Learner(make_policy(), config(tmp_path, "learning.lr=1e-2"))
    found = [learner.update(groups)["policy/reference_kl"] for _ in range(10)]
    assert found[-1] < 0.5 * found[0]
    student = make_policy()
    student.load_state_dict(teacher.state_dict())
    metrics = Learner(student, config(tmp_path)).update(groups)
    assert abs(metrics["policy/loss"]) < 1e-12 and metrics["policy/gradient_norm"] < 1e-9


class Scores(BaseHTTPRequestHandler):
    """Scores the tokens of a prompt as a server does: None, then each token's own logprob."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/inference/v1/generate" and asked["sampling_params"]["prompt_logprobs"] == 1
        tokens = torch.tensor(asked["token_ids"])
        attention = PackedAttention([len(tokens)], torch.device("cpu"))
        teacher = self.server.teacher
        with torch.no_grad():
            logprobs = teacher.logits(teacher(tokens, attention.positions_T, attention)).log_softmax(-1)
        told = [{str(t): {"logprob": logprobs[i, t].item()}} for i, t in enumerate(tokens[1:].tolist())]
        body = json.dumps({"prompt_logprobs": [None, *told], "choices": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Prints nothing."""


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scores)
    server.teacher = make_policy(3)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_teacher_behind_a_server_lowers_the_advantages_of_unlikely_tokens(endpoint):
    teacher, expected_policy, groups = make_policy(3), make_policy(), make_groups(temperature=1.0)
    losses = []
    for group in groups:
        for sample, advantage in zip(group.samples, group_advantages(group), strict=True):
            completion = sample.completion
            taught = response_logprobs(teacher, completion).tolist()
            new = response_logprobs(expected_policy, completion)
            for t in (t for t, sampled in enumerate(completion.loss_mask) if sampled):
                own = 0.5 * advantage - (completion.logprobs[t] - taught[t])
                losses.append(clipped((new[t] - completion.logprobs[t]).exp(), own, 0.2, 0.2))
    expected = sum(losses) / len(losses)
    expected.backward()
    policy = make_policy()
    learner = Learner(policy, config(endpoint, "learning.distill.reward_weight=0.5"))
    gradients = watch_gradients(learner)
    assert learner.update(groups)["policy/loss"] == pytest.approx(expected.item(), rel=1e-9)
    for name, parameter in expected_policy.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-12, msg=name)


def test_server_that_scores_nothing_is_named(endpoint):
    with pytest.raises(ConfigError, match=f"teacher = '{endpoint}/elsewhere' did not score a response"):
        Learner(make_policy(), config(f"{endpoint}/elsewhere")).update(make_groups())


def test_vocabularies_may_be_padded_differently(tmp_path):
    """Two sizes of one family often are; the padding is no token."""
    shape = make_policy().config
    wider = Decoder(type(shape)(**{**vars(shape), "vocab_size": 40}), torch.float64).initialise(3)
    save_policy(wider, tmp_path)
    metrics = Learner(make_policy(), config(tmp_path)).update(make_groups())
    assert 0 < metrics["policy/reference_kl"] < 10


def test_distillation_keys_that_cannot_be_are_refused():
    for given, said in (
        (["learning.algorithm=distill"], "'distill' needs a teacher: name its folder"),
        (["learning.distill.teacher=x"], "does not apply to learning.algorithm = 'grpo'"),
        (["learning.distill.top_k=8"], "learning.distill.teacher is empty"),
        (
            [
                "learning.algorithm=distill",
                "learning.distill.teacher=http://x",
                "learning.distill.kl=forward",
            ],
            "kl = 'forward' does not apply: learning.distill.teacher = 'http://x' tells the logprobs",
        ),
        (
            ["learning.algorithm=distill", "learning.distill.teacher=http://x", "rollout.temperature=0.7"],
            "rollout.temperature = 0.7: learning.distill.teacher = 'http://x' scores at temperature 1",
        ),
    ):
        with pytest.raises(ConfigError) as refused:
            load_config(None, given)
        assert said in str(refused.value)
    assert not Distill.kl_in_reward
