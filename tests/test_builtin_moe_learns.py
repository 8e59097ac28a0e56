"""The built-in policy with experts: shipped as a folder that transformers opens too, and RL improves it."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers

from paceline.models.source import policy_folder
from paceline.policy.attention import PackedAttention
from paceline.policy.huggingface import load_policy


def test_builtin_moe_folder_is_small_and_opens_in_transformers():
    folder = policy_folder("builtin-moe")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4e6
    policy = load_policy(folder, torch.float32)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens_T = torch.arange(1, policy.config.vocab_size)
    packed = PackedAttention([len(tokens_T)], torch.device("cpu"))
    with torch.no_grad():
        ours = policy.logits(policy(tokens_T, packed.positions_T, packed))
        torch.testing.assert_close(ours, oracle(tokens_T[None]).logits[0], rtol=0, atol=1e-3)


def test_builtin_moe_policy_uses_its_experts():
    """Nothing balances the load in training; a router that sends every token to the same two would make this
    a dense policy.
    """
    from paceline.policy.tokenizer import load_tokenizer
    from paceline.tasks.running_sums import RunningSums

    folder = policy_folder("builtin-moe")
    policy, tokenizer = load_policy(folder, torch.float32), load_tokenizer(folder)
    prompts = [tokenizer.encode(problem.prompt).ids for problem in RunningSums(0, 1, 50).held_out]
    packed = PackedAttention([len(p) for p in prompts], torch.device("cpu"))
    used = [set() for _ in policy.layers]
    for layer, experts in zip(policy.layers, used, strict=True):
        layer.feed_forward.register_forward_pre_hook(
            lambda module, x, experts=experts: experts.update(module.route(x[0])[1].flatten().tolist())
        )
    with torch.no_grad():
        policy(torch.tensor(sum(prompts, [])), packed.positions_T, packed)
    assert all(len(experts) >= 6 for experts in used), [len(experts) for experts in used]


@pytest.mark.slow
def test_builtin_moe_accuracy_rises(tmp_path):
    command = [
        sys.executable,
        "-m",
        "paceline",
        "train",
        "builtin-moe",
        f"run.root={tmp_path}",
        "run.name=run",
        "report.closing_pairs=0",
    ]
    output = subprocess.run(
        command, env={**os.environ, "COLUMNS": "120"}, capture_output=True, text=True, timeout=3600
    )
    assert output.returncode == 0, output.stderr
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    evaluations = [r for r in records if r["kind"] == "eval"]
    before, after = evaluations[0], evaluations[-1]
    print(before, after)
    assert 0.25 <= before["eval/accuracy"] <= 0.50
    assert after["eval/accuracy"] >= before["eval/accuracy"] + 0.25
