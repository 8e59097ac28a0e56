"""vLLM on the workloads of `paceline bench`, for vLLM's column of benchmarks/notes/README.md.

Needs vLLM, not Paceline:

    export VLLM_USE_FLASHINFER_SAMPLER=0
    python benchmarks/peer_vllm.py --json vllm.json
    python benchmarks/peer_vllm.py --model qwen3-30b-a3b --precision fp8 --tables decode

A named shape with dummy weights, temperature 1, no stop token, no logprobs asked for (Paceline returns them
always). One engine serves everything, with a KV pool of `--kv-tokens`: more than the decode steps and the
long-tailed rollout ever use, too little for the rollout at 32k context, which must preempt. A step is (time
for n + 1 new tokens - time for 1) / n. FP8 is vLLM's block format (128 x 128 weights, dynamic 1 x 128
activations), as a checkpoint of that kind would be served; vLLM's dummy ones have scales of both signs and
weights that round to zero, with which tokens of a mixture of experts may all choose the same experts, so both
are filled anew. Starting takes minutes, and kernels are still compiled while the first requests run, so what
is measured runs once before (but for the rollout at 32k context). With `--gate FILE` the measurements wait
for that file: several peers can start and warm up at once and then be measured one by one.
"""

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

QWEN3_8B = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    hidden_act="silu",
    attention_bias=False,
    tie_word_embeddings=False,
    dtype="bfloat16",
    bos_token_id=151643,
    eos_token_id=151645,
)
QWEN3_30B_A3B = QWEN3_8B | dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
QWEN3_4B = QWEN3_8B | dict(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True)
QWEN3_14B = QWEN3_8B | dict(
    hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40
)
QWEN2_5_7B = QWEN3_8B | dict(
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    max_position_embeddings=32768,
)
LLAMA_3_1_8B = QWEN3_8B | dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    intermediate_size=14336,
    num_hidden_layers=32,
    vocab_size=128256,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    bos_token_id=128000,
    eos_token_id=128001,
)
BLOCK_FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
TINY = QWEN3_8B | dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    bos_token_id=0,
    eos_token_id=1,
)
MODELS = {
    "qwen3-4b": QWEN3_4B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-14b": QWEN3_14B,
    "qwen2.5-7b": QWEN2_5_7B,
    "llama-3.1-8b": LLAMA_3_1_8B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "tiny": TINY,
}


def lognormal_lengths(count: int, mean: float, sigma: float, low: int, high: int) -> list[int]:
    """Returns lengths as `paceline bench rollout --lengths lognormal:...` draws them."""
    rng = random.Random(0)
    return [
        max(low, min(high, int(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))
        for _ in range(count)
    ]


def spread(values: list[float]) -> dict[str, float]:
    return dict(median=statistics.median(values), low=min(values), high=max(values))


def fill_weights(worker) -> int:
    """Gives FP8 weights and their scales values that a checkpoint might have; returns how many it did.

    Called in vLLM's own process.
    """
    import torch

    filled = 0
    for name, parameter in worker.model_runner.model.named_parameters():
        if "weight_scale" in name:
            parameter.data.fill_(0.01)
        elif parameter.dtype == torch.float8_e4m3fn:
            for part in parameter.data.flatten(0, -2).split(1 << 16):
                part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=part.device))
        else:
            continue
        filled += 1
    return filled


class Peer:
    """One vLLM engine."""

    def __init__(
        self,
        config: dict,
        precision: str,
        kv_tokens: int,
        max_length: int,
        block_size: int,
        graphs: list[int] | None,
    ) -> None:
        from vllm import LLM

        self.vocab_size = config["vocab_size"]
        kv_bytes = (
            2
            * config["num_hidden_layers"]
            * config["num_key_value_heads"]
            * config["head_dim"]
            * (1 if precision == "fp8+kv" else 2)
        )
        blocks = kv_tokens // block_size
        if precision != "bf16":
            config = config | dict(quantization_config=BLOCK_FP8)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            start = time.perf_counter()
            self.llm = LLM(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype="bfloat16",
                max_model_len=max_length,
                max_num_seqs=256,
                num_gpu_blocks_override=blocks,
                kv_cache_memory_bytes=blocks * block_size * kv_bytes,
                gpu_memory_utilization=0.1,
                kv_cache_dtype="fp8" if precision == "fp8+kv" else "auto",
                block_size=block_size,
                enable_prefix_caching=False,
                disable_log_stats=False,
                **(dict(compilation_config=dict(cudagraph_capture_sizes=graphs)) if graphs else {}),
            )
            self.start_seconds = time.perf_counter() - start
        if precision != "bf16":
            assert all(self.llm.collective_rpc(fill_weights)), "no FP8 weights were found"

    def is_finite(self) -> bool:
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=0)
        [output] = self.llm.generate([dict(prompt_token_ids=[5, 7, 9])], params, use_tqdm=False)
        return math.isfinite(output.outputs[0].cumulative_logprob)

    def seconds(self, lengths: list[int], prompt_tokens: int) -> float:
        """Returns how long it takes to give each request exactly its length."""
        from vllm import SamplingParams

        rng = random.Random(0)
        prompts = [
            dict(prompt_token_ids=[rng.randrange(self.vocab_size) for _ in range(prompt_tokens)])
            for _ in lengths
        ]
        params = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in lengths
        ]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        got = [len(output.outputs[0].token_ids) for output in outputs]
        assert sorted(got) == sorted(lengths), f"{sum(got)} tokens came back instead of {sum(lengths)}"
        return elapsed

    def preemptions(self) -> int:
        return int(
            sum(metric.value for metric in self.llm.get_metrics() if metric.name == "vllm:num_preemptions")
        )


def decode_point(peer: Peer, batch: int, prompt_tokens: int, new_tokens: int, repeats: int) -> dict:
    shorts = []
    steps = []
    for _ in range(repeats):
        shorts.append(peer.seconds([1] * batch, prompt_tokens))
        steps.append((peer.seconds([new_tokens + 1] * batch, prompt_tokens) - shorts[-1]) / new_tokens * 1e3)
    return dict(batch=batch, step_ms=spread(steps), prefill_ms=spread([s * 1e3 for s in shorts]))


def rollout_point(peer: Peer, lengths: list[int], prompt_tokens: int, repeats: int) -> dict:
    before = peer.preemptions()
    seconds = spread([peer.seconds(lengths, prompt_tokens) for _ in range(repeats)])
    preemptions = (peer.preemptions() - before) / repeats
    return dict(
        requests=len(lengths),
        tokens=sum(lengths),
        longest=max(lengths),
        seconds=seconds,
        preemptions=preemptions,
    )


@dataclass(frozen=True)
class Workload:
    """What is measured, by the size of the model."""

    batches: tuple[int, ...]
    new_tokens: int
    long_tail: list[int]  # output lengths of the rollout
    pressed: list[int]  # output lengths of the rollout whose prompts outgrow the KV pool
    pressed_prompt: int
    max_length: int
    block_size: int


REAL = Workload(
    batches=(1, 8, 32, 64, 128, 256),
    new_tokens=256,
    long_tail=lognormal_lengths(256, 512, 1.0, 16, 4096),
    pressed=lognormal_lengths(12, 750, 0.6, 256, 2000),
    pressed_prompt=28_000,
    max_length=33_000,
    block_size=16,
)
# A CPU build of vLLM, where the toy runs, wants blocks of 32.
TOY = Workload(
    batches=(1, 4),
    new_tokens=16,
    long_tail=lognormal_lengths(8, 30, 1.0, 4, 200),
    pressed=lognormal_lengths(6, 60, 0.6, 16, 150),
    pressed_prompt=400,
    max_length=600,
    block_size=32,
)
TABLES = ("decode", "rollout", "rollout_32k")
PROMPT_TOKENS = 128
SHORT_LENGTH = 4_400  # enough for everything but the rollout at 32k context


def table_names(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(TABLES):
        raise argparse.ArgumentTypeError(f"{text!r}: must be of {', '.join(TABLES)}, with commas between")
    return names


def batch_sizes(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        choices=MODELS,
        default="qwen3-8b",
        help="tiny: a toy and toy workloads, to see whether the script runs",
    )
    parser.add_argument("--precision", choices=("bf16", "fp8", "fp8+kv"), default="bf16")
    parser.add_argument("--tables", type=table_names, default="decode,rollout,rollout_32k")
    parser.add_argument("--kv-tokens", type=int, default=170_000)
    parser.add_argument("--batches", type=batch_sizes, help="of the decode steps, with commas between")
    parser.add_argument("--new", type=int, help="tokens a decode step's time is taken over")
    parser.add_argument("--decode-repeats", type=int, default=2)
    parser.add_argument("--rollout-repeats", type=int, default=2)
    parser.add_argument("--gate", type=Path, help="wait for this file between starting and measuring")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def start_peer(options: argparse.Namespace, workload: Workload, tables: list[str]) -> Peer:
    """Starts an engine that has what the tables need, and no more."""
    long_context = "rollout_32k" in tables or options.model == "tiny"
    # Decoding alone runs at these sizes only: the others need not be captured.
    graphs = [*workload.batches] if tables == ["decode"] else None
    return Peer(
        MODELS[options.model],
        options.precision,
        options.kv_tokens,
        workload.max_length if long_context else SHORT_LENGTH,
        workload.block_size,
        graphs,
    )


def warm_up(peer: Peer, workload: Workload, tables: list[str]) -> None:
    """Runs everything once, so that nothing is compiled while it is measured."""
    for batch in workload.batches:
        decode_point(peer, batch, PROMPT_TOKENS, 16, 2)
    if "rollout" in tables:
        peer.seconds(workload.long_tail, PROMPT_TOKENS)


def measure(peer: Peer, workload: Workload, table: str, options: argparse.Namespace) -> list | dict:
    if table == "decode":
        points = []
        for batch in workload.batches:
            repeats = options.decode_repeats
            points.append(decode_point(peer, batch, PROMPT_TOKENS, workload.new_tokens, repeats))
            print(json.dumps(points[-1]), flush=True)  # in case there is no time for the others
        return points
    if table == "rollout":
        return rollout_point(peer, workload.long_tail, PROMPT_TOKENS, options.rollout_repeats)
    return rollout_point(peer, workload.pressed, workload.pressed_prompt, 1)


def main() -> None:
    """Starts vLLM, measures the requested tables and writes each when it is done."""
    options = parse_options()
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `fill_weights` goes to its process as it is
    import torch
    import vllm

    workload = TOY if options.model == "tiny" else REAL
    workload = replace(
        workload,
        batches=options.batches or workload.batches,
        new_tokens=options.new or workload.new_tokens,
    )
    tables = options.tables
    peer = start_peer(options, workload, tables)
    figures = dict(
        model=options.model,
        precision=options.precision,
        vllm=vllm.__version__,
        torch=torch.__version__,
        kv_tokens=options.kv_tokens,
    )

    def note(key: str, value: object) -> None:
        figures[key] = value
        print(json.dumps({key: value}), flush=True)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=2) + "\n")

    note("start_seconds", peer.start_seconds)
    note("finite", peer.is_finite())
    warm_up(peer, workload, tables)
    note("warm", True)
    while options.gate is not None and not options.gate.exists():
        time.sleep(0.2)
    for table in tables:
        note(table, measure(peer, workload, table, options))


if __name__ == "__main__":
    main()
