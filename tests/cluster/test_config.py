"""What the section `cluster` refuses, and with which way out."""

import pytest

from paceline.config import ConfigError, load_config


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["cluster.learners=2"], "cluster.learners = 2 needs cluster.replicas of at least 1"),
        (["cluster.runtime=ray"], "cluster.runtime = 'ray' does not apply: cluster.replicas is 0"),
        (["cluster.transport=memory"], "cluster.transport = 'memory' does not apply: cluster.replicas is 0"),
        (["cluster.replicas=2", "cluster.placement=colocated"], "must equal the learners, 1"),
        (["cluster.replicas=2", "rollout.backend=vllm"], "cluster.replicas = 2: with .* one engine serves"),
        (["cluster.replicas=2", "rollout.precision=kv"], "precision = 'kv' scales are measured"),
        (
            [
                "cluster.replicas=2",
                "rollout.backend=reference",
                "rollout.speculation.drafters=[eagle]",
                "rollout.speculation.online.share=0.1",
            ],
            "online.share = 0.1: rollout.backend = 'reference' .*; use rollout.backend=native, or",
        ),
        (
            ["cluster.replicas=2", "rollout.speculation.drafters=[history]"]
            + ["rollout.speculation.online.share=0.1"],
            "online.share = 0.1 does not apply: .*lacks 'eagle'",
        ),
        (
            ["cluster.replicas=2", "rollout.backend=vllm", "rollout.speculation.drafters=[eagle]"]
            + ["rollout.speculation.pacing=fixed", "rollout.speculation.verify=rejection"]
            + ["rollout.speculation.online.share=0.1"],
            "cluster.replicas = 2: with rollout.backend = 'vllm' one engine serves",
        ),
        (
            ["cluster.replicas=1", "cluster.placement=colocated", "rollout.mode=async"],
            "use cluster.placement=apart, or rollout.mode=partial",
        ),
        (["cluster.replicas=2", "rollout.precision=kv"], "use rollout.precision=base, or cluster.replicas=0"),
        (
            ["cluster.replicas=2", "cluster.runtime=ray", "cluster.transport=ipc"],
            "cluster.transport = 'ipc' reaches processes of one machine",
        ),
    ],
)
def test_cluster_config_refuses_what_several_processes_cannot_do(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides)


def test_cluster_config_allows_a_head_to_learn_in_replicas():
    keys = ["cluster.replicas=2", "rollout.speculation.drafters=[eagle]"]
    assert load_config(None, [*keys, "rollout.speculation.online.share=0.1"]).rollout.head_may_learn
