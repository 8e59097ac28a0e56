"""transformers on the workload of `paceline bench learn`, for its column of benchmarks/notes/learning.md.

    PYTHONPATH=src python benchmarks/peer_learner.py --shape qwen3-4b

A Qwen3 of the same size with random bf16 weights, the same 64 responses in the same micro-batches, packed in
one row with `position_ids` that start again at every sequence. Attention is by default the variable-length
flash kernel that Paceline calls, registered with transformers (`packed`, in no fixed order, its faster way);
its own `flex_attention` compiles for each length of a micro-batch, and its `sdpa` takes a dense mask of
16k x 16k. Liger's kernels are used where installed. The loss is GRPO's, over response tokens, the head in
chunks that are computed again in the backward pass. Optimiser: torch's fused AdamW on the bf16 weights, which
is less work than Paceline's float32 masters. Layers are checkpointed where the update does not fit without;
both ways are tried, and each prints a line of JSON.
"""

import argparse
import gc
import importlib.util
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from paceline.bench.learn import LearnWorkload, model_operations
from paceline.bench.lengths import Lengths
from paceline.learning.batch import MicroBatch, TrainingSequence, pack, split_by_tokens, training_sequence
from paceline.policy.attention import PackedAttention
from paceline.policy.config import DecoderConfig
from paceline.policy.shapes import SHAPES

CHUNK_ROWS = 2048
PEAK = 989e12
# The packing of the current micro-batch, which transformers does not pass to its attention functions.
PACKED: list[PackedAttention] = []


def packed_flash(module, query, key, value, attention_mask, **others) -> tuple[torch.Tensor, None]:
    """An attention function for transformers: `[1, heads, tokens, dim]` in, `[1, tokens, heads, dim]` out."""
    out_THD = PACKED[-1].attend(*(x[0].transpose(0, 1) for x in (query, key, value)))
    return out_THD[None], None


def make_model(shape: DecoderConfig, attention: str, checkpointing: bool, device: str) -> Any:
    from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register("packed", packed_flash)
    AttentionMaskInterface.register("packed", lambda *arguments, **others: None)
    if importlib.util.find_spec("liger_kernel"):
        liger = importlib.import_module("liger_kernel.transformers")
        liger.apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False)
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
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def chunk_logprobs(head: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = head(hidden).float()
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(-1)


def token_logprobs(model: Any, batch: MicroBatch) -> torch.Tensor:
    PACKED[:] = [batch.attention]
    batch.attention.deterministic = False
    hidden = model.model(
        input_ids=batch.tokens_T[None], position_ids=batch.attention.positions_T[None]
    ).last_hidden_state[0][batch.predictors_R]
    parts = zip(hidden.split(CHUNK_ROWS), batch.targets_R.split(CHUNK_ROWS), strict=True)
    return torch.cat([checkpoint(chunk_logprobs, model.lm_head, h, t, use_reentrant=False) for h, t in parts])


def update(model: Any, optimiser: torch.optim.Optimizer, batches: list[MicroBatch], total: int) -> None:
    for batch in batches:
        ratio = (token_logprobs(model, batch) - batch.rollout_logprobs_R.float()).exp()
        advantages = batch.advantages_R.float()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / total
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


def timed_updates(model: Any, parts: list[list[TrainingSequence]], repeats: int) -> Iterator[float]:
    """Yields the seconds of each update, the first of which compiles and warms up."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.99), fused=True)
    total = sum(sequence.loss_tokens for part in parts for sequence in part)
    batches = [pack(part, torch.device("cuda")) for part in parts]
    for number in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        update(model, optimiser, batches, total)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        print(f"update {number}: {seconds:.2f} s", flush=True)
        yield seconds


def measure(arguments: argparse.Namespace, checkpointing: bool) -> dict:
    shape = SHAPES[arguments.shape]
    workload = LearnWorkload(192, 8, Lengths.parse("lognormal:1196,1.0,16,6000", 64).values)
    sequences = [
        replace(training_sequence(sample.completion), advantage=sample.score.reward - 0.5)
        for group in workload.groups(shape.vocab_size)
        for sample in group.samples
    ]
    start = time.perf_counter()
    model = make_model(shape, arguments.attention, checkpointing, "cuda")
    print(f"model made in {time.perf_counter() - start:.1f} s", flush=True)
    torch.cuda.reset_peak_memory_stats()
    parts = split_by_tokens(sequences, arguments.micro_batch_tokens)
    first, *seconds = timed_updates(model, parts, arguments.repeats)
    median = sorted(seconds)[len(seconds) // 2]
    return {
        "shape": arguments.shape,
        "attention": arguments.attention,
        "checkpointing": checkpointing,
        "liger": bool(importlib.util.find_spec("liger_kernel")),
        "first_seconds": first,
        "seconds": median,
        "tokens_per_second": sum(workload.lengths) / median,
        "mfu": model_operations(shape, workload.lengths) / median / PEAK,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-4b", choices=[n for n in SHAPES if n.startswith("qwen3")])
    parser.add_argument("--attention", default="packed", help="packed, flex_attention or sdpa")
    parser.add_argument("--checkpointing", default="off,on", help="off, on or both, comma separated")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    figures = []
    for way in arguments.checkpointing.split(","):
        try:
            figures.append(measure(arguments, way == "on"))
            print(json.dumps(figures[-1]), flush=True)
        except torch.OutOfMemoryError as error:
            print(f"checkpointing {way}: out of memory ({str(error)[:100]})", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
