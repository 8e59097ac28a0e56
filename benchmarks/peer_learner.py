"""transformers on the workload of `paceline bench learn`, for its column of docs/benchmarks/learning.md.

    PYTHONPATH=src python benchmarks/peer_learner.py --shape qwen3-4b --checkpointing

A Qwen3 of the same size with random bf16 weights, the same 64 responses in the same micro-batches, packed in
one row with `position_ids` that start again at every sequence. The loss is GRPO's, over response tokens, the
head in chunks that are computed again in the backward pass. Optimiser: torch's fused AdamW on the bf16
weights, which is less work than Paceline's float32 masters. Liger's kernels are used where installed.
"""

import argparse
import importlib.util
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

from paceline.bench.learn import LearnWorkload, model_operations
from paceline.bench.lengths import Lengths
from paceline.learning.batch import pack, split_by_tokens, training_sequence
from paceline.policy.shapes import SHAPES

CHUNK_ROWS = 2048
PEAK = 989e12


def make_model(shape, attention: str, checkpointing: bool):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False)
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tie_embeddings,
        attn_implementation=attention,
        use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def chunk_logprobs(head, hidden, targets):
    logits = head(hidden).float()
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(-1)


def update(model, optimiser, parts) -> None:
    total = sum(sequence.loss_tokens for part in parts for sequence in part)
    for part in parts:
        batch = pack(part, torch.device("cuda"))
        hidden = model.model(
            input_ids=batch.tokens_T[None], position_ids=batch.attention.positions_T[None]
        ).last_hidden_state[0][batch.predictors_R]
        logprobs = torch.cat(
            [
                checkpoint(chunk_logprobs, model.lm_head, h, t, use_reentrant=False)
                for h, t in zip(hidden.split(CHUNK_ROWS), batch.targets_R.split(CHUNK_ROWS), strict=True)
            ]
        )
        ratio = (logprobs - batch.rollout_logprobs_R.float()).exp()
        advantages = batch.advantages_R.float()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / total
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-4b", choices=[n for n in SHAPES if n.startswith("qwen3")])
    parser.add_argument("--attention", default="flex_attention")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    workload = LearnWorkload(192, 8, Lengths.parse("lognormal:1196,1.0,16,6000", 64).values)
    sequences = [
        replace(training_sequence(sample.completion), advantage=sample.score.reward - 0.5)
        for group in workload.groups(shape.vocab_size)
        for sample in group.samples
    ]
    parts = split_by_tokens(sequences, arguments.micro_batch_tokens)
    model = make_model(shape, arguments.attention, arguments.checkpointing)
    if arguments.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.99), fused=True)
    seconds = []
    for _ in range(arguments.repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        update(model, optimiser, parts)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    tokens = sum(workload.lengths)
    best = sorted(seconds[1:])[len(seconds[1:]) // 2]
    figures = {
        **{key: value for key, value in vars(arguments).items() if key != "json"},
        "liger": bool(importlib.util.find_spec("liger_kernel")),
        "first_seconds": seconds[0],
        "seconds": best,
        "tokens_per_second": tokens / best,
        "mfu": model_operations(shape, workload.lengths) / best / PEAK,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }
    print(json.dumps(figures))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
