"""The update against direct formulas in float64: loss, gradients, independence of how the batch is cut."""

import math

import pytest
import torch

from paceline.config import LearningConfig, load_config
from paceline.learning.advantages import group_advantages
from paceline.learning.batch import micro_batches, training_sequences
from paceline.learning.learner import Learner
from paceline.learning.logprobs import token_logprobs
from paceline.policy.attention import PackedAttention
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.types import Completion, FinishReason, Group, Request, Sample, SamplingParams, Score, Segment

CONFIG = DecoderConfig("qwen3", 31, 32, 48, 2, 4, 2, 8, 128, qk_norm=True)


def make_policy(seed: int = 0) -> Decoder:
    return Decoder(CONFIG, torch.float64).initialise(seed)


def make_groups(generator_seed: int = 0, temperature: float = 0.7) -> list[Group]:
    """Two prompts with four samples each; one sample has an observation in the middle, outside the loss."""
    g = torch.Generator().manual_seed(generator_seed)
    groups = []
    for p in range(2):
        prompt = tuple(torch.randint(0, 31, (3 + p,), generator=g).tolist())
        samples = []
        for s in range(4):
            length = 2 + 3 * s + p
            tokens = tuple(torch.randint(0, 31, (length,), generator=g).tolist())
            logprobs = tuple((-3.4 + 0.3 * torch.randn(length, generator=g)).tolist())
            segments = (Segment(0, length, 0),)
            if s == 3:
                segments = (Segment(0, 4, 0), Segment(4, 6, 0, sampled=False), Segment(6, length, 1))
            request = Request(f"{p}/{s}", prompt, s, SamplingParams(temperature=temperature))
            completion = Completion(request, tokens, logprobs, FinishReason.STOP, segments)
            samples.append(Sample(completion, Score(reward=float((s + p) % 3), correct=False)))
        groups.append(Group(str(p), tuple(samples)))
    return groups


def direct_loss(policy: Decoder, reference: Decoder, groups: list[Group], config: LearningConfig) -> torch.Tensor:
    """GRPO as the paper writes it: a Python loop over samples and tokens, one forward pass per sample."""

    def logprobs(model: Decoder, completion: Completion) -> torch.Tensor:
        sequence = torch.tensor(completion.request.prompt + completion.tokens)
        attention = PackedAttention([len(sequence)], torch.device("cpu"))
        logits = model.logits(model(sequence, attention.positions_T, attention)) / completion.request.sampling.temperature
        start = len(completion.request.prompt)
        return torch.stack([logits[i - 1].log_softmax(-1)[sequence[i]] for i in range(start, len(sequence))])

    token_losses, sequence_losses = [], []
    for group in groups:
        rewards = torch.tensor(group.rewards, dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for sample, advantage in zip(group.samples, advantages, strict=True):
            new = logprobs(policy, sample.completion)
            old = torch.tensor(sample.completion.logprobs)
            fixed = logprobs(reference, sample.completion).detach()
            losses = []
            for t, use in enumerate(sample.completion.loss_mask):
                if not use:
                    continue
                ratio = (new[t] - old[t]).exp()
                clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
                kl = (fixed[t] - new[t]).exp() - (fixed[t] - new[t]) - 1
                losses.append(-torch.minimum(ratio * advantage, clipped * advantage) + config.kl_coef * kl)
            token_losses += losses
            sequence_losses.append(torch.stack(losses).mean())
    return torch.stack(token_losses if config.loss_mean == "token" else sequence_losses).mean()


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
@pytest.mark.parametrize("budget", [64, 4096])
def test_update_follows_the_formula(loss_mean, budget):
    overrides = ["learning.kl_coef=0.1", f"learning.loss_mean={loss_mean}", "learning.clip_high=0.05", f"learning.micro_batch_tokens={budget}"]
    config = load_config(None, [*overrides, "learning.max_grad_norm=1e9", "rollout.prompts_per_step=2"])
    policy, groups = make_policy(), make_groups()
    learner = Learner(policy, config)
    learner.reference = make_policy(seed=1).requires_grad_(False)
    oracle = make_policy()
    expected = direct_loss(oracle, learner.reference, groups, config.learning)
    expected.backward()

    seen = {}
    original_step = learner.optimiser.step
    learner.optimiser.step = lambda: (seen.update({n: p.grad.clone() for n, p in policy.named_parameters()}), original_step())[1]
    metrics = learner.update(groups)
    assert metrics["policy/loss"] == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in oracle.named_parameters():
        torch.testing.assert_close(seen[name], parameter.grad, rtol=1e-5, atol=1e-8, msg=name)
    assert 0 < metrics["policy/clip_fraction"] < 1
    assert metrics["policy/reference_kl"] > 0


def test_entropy_and_chunking(monkeypatch):
    policy, groups = make_policy(), make_groups()
    batch = micro_batches(training_sequences(groups, [[1.0] * 4] * 2), 4096, torch.device("cpu"))[0]
    whole = token_logprobs(policy, batch)
    monkeypatch.setattr("paceline.learning.logprobs.CHUNK_ELEMENTS", 31 * 5)
    chunked = token_logprobs(policy, batch)
    torch.testing.assert_close(whole, chunked)
    hidden = policy(batch.tokens_T, batch.attention.positions_T, batch.attention)[batch.predictors_R]
    distribution = torch.distributions.Categorical(logits=policy.logits(hidden) / 0.7)
    torch.testing.assert_close(whole[1], distribution.entropy(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole[0], distribution.log_prob(batch.targets_R), rtol=1e-6, atol=1e-6)


def test_equal_rewards_skip_the_update_and_say_so():
    policy, groups = make_policy(), make_groups()
    flat = [Group(g.prompt_id, tuple(Sample(s.completion, Score(1.0, True)) for s in g.samples)) for g in groups]
    before = [p.clone() for p in policy.parameters()]
    metrics = Learner(policy, load_config(None, ["rollout.prompts_per_step=2"])).update(flat)
    assert metrics == {"policy/skipped": 1.0}
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_a_nan_gradient_leaves_weights_and_moments_alone():
    policy, groups = make_policy(), make_groups()
    learner = Learner(policy, load_config(None, ["rollout.prompts_per_step=2"]))
    learner.update(groups)
    before = [p.clone() for p in policy.parameters()] + [m.clone() for m in learner.optimiser.second_moments]
    poisoned = groups[0].samples[0]
    object.__setattr__(poisoned.completion, "logprobs", (math.nan,) * len(poisoned.completion.tokens))
    metrics = learner.update(groups)
    assert metrics["policy/skipped"] == 1.0 and math.isnan(metrics["policy/gradient_norm"])
    after = [*policy.parameters(), *learner.optimiser.second_moments]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_minibatches_take_one_optimiser_step_each():
    learner = Learner(make_policy(), load_config(None, ["rollout.prompts_per_step=2", "learning.minibatches=2", "learning.epochs=3"]))
    learner.update(make_groups())
    assert learner.optimiser.steps == 6


def test_advantages():
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    tensor = torch.tensor(rewards, dtype=torch.float64)
    expected = ((tensor - tensor.mean()) / (tensor.std() + 1e-6)).tolist()
    assert group_advantages(rewards, normalise=True) == pytest.approx(expected)
    assert group_advantages(rewards, normalise=False) == pytest.approx((tensor - tensor.mean()).tolist())
    assert group_advantages([0.5] * 4, normalise=True) == [0.0] * 4
    assert group_advantages([0.5], normalise=True) == [0.0]
