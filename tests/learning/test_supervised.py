"""Supervised steps against plain float64 autograd, example by example, however they are packed and where."""

import numpy as np
import pytest
import torch

from paceline.config import LoraConfig
from paceline.learning.distributed.rank_learner import RankLearner
from paceline.learning.distributed.sharding import whole
from paceline.learning.learner import Learner
from paceline.learning.supervised import imitate, mean_loss, supervised_sequence
from paceline.policy.attention import PackedAttention
from paceline.policy.huggingface import save_policy
from paceline.policy.lora import add_adapters
from tests.learning.rank_processes import run_ranks
from tests.learning.samples import make_config, make_policy

LORA = LoraConfig(rank=3, alpha=6, targets=["q_proj", "v_proj", "down_proj"])


def make_examples(count: int = 9, longest: int = 40):
    """Examples of several turns: learned and other tokens in pieces, as a chat has them."""
    rng = np.random.default_rng(0)
    examples = []
    for i in range(count):
        length = 3 + (longest - 3) * i // (count - 1)
        learned = rng.random(length) < 0.6
        learned[0], learned[-1] = False, True
        examples.append((rng.integers(0, 31, length), learned))
    return examples


def sequences(examples):
    return [supervised_sequence(*example) for example in examples]


def config(*overrides: str):
    return make_config("learning.algorithm=sft", "learning.lr=1e-3", *overrides)


def loss_by_hand(policy, examples):
    """The mean over all learned tokens of -log pi, one example at a time, without our packing or head."""
    losses = []
    for tokens, learned in examples:
        tokens = torch.as_tensor(tokens)
        attention = PackedAttention([len(tokens)], torch.device("cpu"))
        logprobs = policy.logits(policy(tokens, attention.positions_T, attention)).log_softmax(-1)
        losses += [-logprobs[i - 1, tokens[i]] for i in np.flatnonzero(learned)]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("budget", [64, 4096])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "LoRA"])
def test_supervised_loss_and_gradients_are_those_of_single_examples(budget, lora, monkeypatch):
    """Packed into one micro-batch or five, with nothing of one example in another."""
    examples = make_examples()
    ours, theirs = make_policy(), make_policy()
    for policy in (ours, theirs):
        if lora is not None:
            add_adapters(policy, lora, seed=7)
    loss = loss_by_hand(theirs, examples)
    loss.backward()
    learner = Learner(ours, config(f"learning.micro_batch_tokens={budget}"))
    gradients = {}

    def keep(scale=1.0):
        gradients.update({name: p.grad.clone() for name, p in ours.named_parameters() if p.requires_grad})
        return 1.0

    monkeypatch.setattr(learner.optimiser, "step", keep)
    assert mean_loss(learner, sequences(examples)) == pytest.approx(loss.item(), rel=1e-12)
    metrics = imitate(learner, sequences(examples))
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-12)
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-14)


def test_supervised_loss_is_that_of_transformers_on_a_padded_batch(tmp_path):
    """The loss of its trainers, TRL's among them, where the mean is over all tokens of a step."""
    from transformers import AutoModelForCausalLM

    examples, policy = make_examples(), make_policy()
    save_policy(policy, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    longest = max(len(tokens) for tokens, _ in examples)
    ids, labels, seen = (torch.full((len(examples), longest), fill) for fill in (0, -100, 0))
    for row, (tokens, learned) in enumerate(examples):
        ids[row, : len(tokens)] = torch.as_tensor(tokens)
        labels[row, : len(tokens)] = torch.where(torch.as_tensor(learned), torch.as_tensor(tokens), -100)
        seen[row, : len(tokens)] = 1
    theirs = model(input_ids=ids, attention_mask=seen, labels=labels).loss.item()
    assert mean_loss(Learner(policy, config()), sequences(examples)) == pytest.approx(theirs, rel=1e-6), (
        "in float32"
    )


@pytest.mark.parametrize("overrides", [(), ("learning.optimiser_state=8bit",), ("learning.precision=fp8",)])
def test_supervised_steps_learn_their_examples(overrides):
    """Full precision, 8-bit moments, FP8 products: each comes far below the entropy it starts from."""
    policy = make_policy().to(torch.float32)
    learner = Learner(policy, config("learning.lr=1e-2", *overrides))
    examples = sequences(make_examples(4, 20))
    before = mean_loss(learner, examples)
    losses = [imitate(learner, examples)["policy/loss"] for _ in range(40)]
    assert losses[0] == pytest.approx(before, rel=1e-3)
    assert losses[-1] < 0.3 * before
    assert mean_loss(learner, examples) <= losses[-1] + 0.05


def _steps_on_ranks(group):
    learner = RankLearner(make_policy(), config("learning.micro_batch_tokens=64"), group)
    examples = sequences(make_examples())
    found = [learner.imitate(examples) for _ in range(2)]
    held_out = learner.held_out_loss(examples[:3])
    return found, held_out, {name: whole(p).clone() for name, p in learner.policy.named_parameters()}


@pytest.mark.slow
def test_supervised_steps_on_ranks_are_those_of_one_process(tmp_path):
    learner = Learner(make_policy(), config("learning.micro_batch_tokens=64"))
    examples = sequences(make_examples())
    alone = [imitate(learner, examples) for _ in range(2)]
    held_out = mean_loss(learner, examples[:3])
    weights = dict(learner.policy.named_parameters())
    for found, found_held_out, found_weights in run_ranks(2, _steps_on_ranks, tmp_path):
        for step, wanted in zip(found, alone, strict=True):
            assert step["policy/loss"] == pytest.approx(wanted["policy/loss"], rel=1e-12)
            assert step["policy/gradient_norm"] == pytest.approx(wanted["policy/gradient_norm"], rel=1e-9)
        assert found_held_out == pytest.approx(held_out, rel=1e-9)
        for name, weight in found_weights.items():
            torch.testing.assert_close(weight, weights[name].detach(), rtol=1e-8, atol=1e-10)
