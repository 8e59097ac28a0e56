"""One rank over NCCL on a GPU makes the update of the single process, and its checkpoint opens there."""

from pathlib import Path

import pytest
import torch

from paceline.config import LoraConfig
from paceline.learning.checkpoint import TrainingState, damage, load_checkpoint
from paceline.learning.distributed.group import join_ranks
from paceline.learning.distributed.rank_learner import RankLearner
from paceline.learning.distributed.sharding import whole
from paceline.learning.learner import Learner
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.lora import add_adapters
from tests.learning.rank_processes import save_by_ranks
from tests.learning.samples import make_config, make_groups
from tests.ports import free_port

pytestmark = pytest.mark.gpu

SHAPE = DecoderConfig("qwen3", 31, 256, 384, 2, 4, 2, 64, 128, qk_norm=True)
LORA = LoraConfig(rank=8, alpha=16, targets=["q_proj", "v_proj", "down_proj"])
STATE = TrainingState(1, 1, 16, 0.5)
# One unit in the last place of a bf16 weight near one: gradients pass a sum over ranks in float32.
NOISE = 2.0**-7


def make_policy(lora: LoraConfig | None, device: str) -> Decoder:
    policy = Decoder(SHAPE, torch.float32).initialise(0).to(torch.bfloat16)
    if lora is not None:
        add_adapters(policy, lora, seed=1)
    policy = policy.to(device)
    policy.rope_table = policy.rope_table.to(device)
    return policy


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "adapters"])
def test_one_rank_over_nccl_makes_the_update_of_a_single_process(lora, tmp_path):
    config = make_config("learning.lr=1e-3", "learning.micro_batch_tokens=64")
    alone = Learner(make_policy(lora, "cuda"), config)
    expected = alone.update(make_groups())
    group = join_ranks("127.0.0.1", free_port(), 0, 1, "cuda:0", timeout=60)
    try:
        learner = RankLearner(make_policy(lora, "cpu"), config, group)
        assert learner.policy.device.type == "cuda"
        metrics = learner.update(make_groups())
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-2, abs=1e-6), name
        weights = {name: whole(p).clone() for name, p in learner.policy.named_parameters()}
        for name, parameter in alone.policy.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=NOISE, msg=name)
        checkpoint = save_by_ranks(learner, tmp_path, STATE, Path(__file__).parent, keep=1)
        assert damage(checkpoint) is None
        assert load_checkpoint(checkpoint, alone.policy, alone.optimiser) == STATE
        for name, parameter in alone.policy.named_parameters():
            assert torch.equal(parameter.detach(), weights[name]), name
        assert learner.load(checkpoint) == STATE
    finally:
        group.leave()
