"""The memory of each GPU of a cluster: shares add up to the whole, and what cannot fit is refused."""

import pytest
import torch

from paceline.cli.plan import show_plan
from paceline.config import ConfigError, load_config
from paceline.plan.cluster import cluster_refusal, gathered_bytes, make_cluster_plan
from paceline.plan.learning import meta_policy
from paceline.plan.machine import named_gpu
from paceline.plan.plan import make_plan
from paceline.policy.shapes import SHAPES

SMALL = SHAPES["qwen3-0.6b"]
BASE = ("policy.activation_checkpointing=true", "rollout.max_running=64", "learning.micro_batch_tokens=2048")


def config_of(*overrides: str):
    return load_config(None, ["policy.path=qwen3-0.6b", *BASE, *overrides])


def plan_of(*overrides: str, gpu: str = "H200"):
    return make_cluster_plan(config_of(*overrides), SMALL, torch.bfloat16, named_gpu(gpu))


@pytest.mark.slow
def test_shares_of_ranks_are_those_of_a_single_gpu_divided():
    single = make_plan(config_of(), SMALL, torch.bfloat16, named_gpu("H200"))
    learner = plan_of("cluster.replicas=4", "cluster.learners=4").plans["learner"]
    for name in ("weights", "float32 masters", "Adam moments", "gradients"):
        share, whole = learner.bytes_of(f"{name}, its share"), single.bytes_of(name)
        assert whole <= 4 * share < whole + 4, name
    assert learner.bytes_of("activations") == single.bytes_of("activations")
    policy = meta_policy(SMALL, config_of(), torch.bfloat16)
    assert learner.bytes_of("gathered layers") == gathered_bytes(policy) < single.bytes_of("weights")
    assert learner.kv_tokens == 0, "a rank generates nothing"


def test_replica_on_its_own_gpu_plans_like_generation_alone():
    replica = plan_of("cluster.replicas=2", "cluster.learners=2").plans["replica"]
    assert replica == make_plan(
        config_of("cluster.replicas=2"), SMALL, torch.bfloat16, named_gpu("H200"), learns=False
    )


@pytest.mark.slow
def test_replica_that_trains_its_head_has_room_for_it_beside_the_cache():
    never = "rollout.speculation.drafters=[eagle]", "rollout.speculation.eagle_path=fresh"
    online = (*never, "rollout.speculation.online.share=0.02", "cluster.replicas=2", "cluster.learners=2")
    apart = plan_of(*online).plans["replica"]
    colocated = plan_of(*online, "cluster.placement=colocated").plans["learner and replica"]
    for plan in (apart, colocated):
        training = [part for part in plan.parts if part.name == "drafter's training"]
        assert [part.phase for part in training] == ["rollout"], (
            "while nothing is generated, beside the cache"
        )
        # A slice's gradients, those from before it, and what its pass holds.
        assert training[0].num_bytes > 2 * plan.bytes_of("drafter's optimiser") / 8
    single = make_plan(
        config_of(*never, "rollout.speculation.online.share=0.02"), SMALL, torch.bfloat16, named_gpu("H200")
    )
    copies = apart.bytes_of("drafter's optimiser"), single.bytes_of("drafter's optimiser")
    assert copies[0] < copies[1], "the same head and optimiser, and a share of the recorded states"


@pytest.mark.slow
def test_colocated_gpu_holds_rank_and_replica():
    plans = plan_of("cluster.replicas=2", "cluster.learners=2", "cluster.placement=colocated").plans
    both = plans["learner and replica"]
    apart = plan_of("cluster.replicas=2", "cluster.learners=2").plans
    assert list(plans) == ["learner and replica"] and not both.problem
    assert both.learning_peak > apart["learner"].learning_peak
    assert both.kv_tokens > 0 and both.machine.taken_bytes > apart["replica"].machine.taken_bytes


@pytest.mark.slow
def test_cluster_refusal_names_how_many_ranks_would_fit():
    large = SHAPES["qwen3-8b"]
    config = config_of("cluster.replicas=1", "cluster.learners=1")
    machine = named_gpu("A100")
    plan = make_cluster_plan(config, large, torch.bfloat16, machine)
    assert "a GPU with a learner: learning needs" in plan.problem
    assert "what would fit: cluster.learners=" in str(
        cluster_refusal(plan, config, large, torch.bfloat16, machine)
    )


def test_plan_command_shows_every_kind_of_gpu(capsys):
    show_plan(config_of("cluster.replicas=2", "cluster.learners=2"), "H200", None, as_json=False)
    shown = capsys.readouterr().out
    assert "learner: " in shown and "replica: " in shown and "4 GPUs, apart" in shown
    with pytest.raises(ConfigError, match="cluster.replicas = 3 must equal the learners, 2"):
        config_of("cluster.replicas=3", "cluster.learners=2", "cluster.placement=colocated")
