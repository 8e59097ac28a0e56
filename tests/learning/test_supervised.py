"""Supervised training on pairs of a file: the loss is the mean over response tokens, however it is packed."""

import json

import pytest
import torch

from paceline.config import LearningConfig
from paceline.learning.supervised import Example, train_supervised
from paceline.learning.warmup import WarmupSettings, warm_up_on_file
from paceline.policy.attention import PackedAttention
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer("0123456789+=")
SHAPE = DecoderConfig("llama", 13, 32, 64, 2, 2, 1, 16, 128, eos_token_ids=(0,))


def make_policy() -> Decoder:
    return Decoder(SHAPE, torch.float64).initialise(0)


@pytest.mark.parametrize("budget", [64, 4096])
def test_supervised_loss_is_the_mean_over_response_tokens(budget):
    examples = [Example(tuple(range(1, 1 + i)), tuple(range(2, 12)) + (0,)) for i in range(1, 11)]
    losses = []
    for example in examples:
        tokens = torch.tensor(example.prompt + example.response)
        attention = PackedAttention([len(tokens)], torch.device("cpu"))
        policy = make_policy()
        logprobs = policy.logits(policy(tokens, attention.positions_T, attention)).log_softmax(-1)
        losses += [-logprobs[i - 1, tokens[i]].item() for i in range(len(example.prompt), len(tokens))]
    seen: list[float] = []
    settings = LearningConfig(lr=1e-3, micro_batch_tokens=budget)
    train_supervised(make_policy(), [examples], 1, settings, lambda step, loss: seen.append(loss))
    assert seen == [pytest.approx(sum(losses) / len(losses), rel=1e-12)]


def test_supervised_example_with_an_empty_prompt_is_refused(tmp_path):
    """Packed, its first token would be predicted by the end of another example."""
    data = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": "1+1=", "response": "2"}, {"prompt": "", "response": "2+2=4"}]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = WarmupSettings(epochs=1, batch_size=2, lr=1e-3, seed=0)
    with pytest.raises(ValueError, match="pairs.jsonl:2: `prompt` has no tokens.*into `prompt`"):
        warm_up_on_file(make_policy(), TOKENIZER, data, settings, lambda step, steps, loss: None)
