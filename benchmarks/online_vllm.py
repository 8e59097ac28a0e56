"""What vLLM accepts of an eagle head's drafts, greedy: `online_vllm.py POLICY HEAD`, where vLLM is."""

import math
import sys

from vllm import LLM, SamplingParams

DEPTH = 5


def main() -> None:
    """Prints accept length and drafts over sums that nobody trained on."""
    policy, head = sys.argv[1:]
    speculation = {"method": "eagle3", "model": head, "num_speculative_tokens": DEPTH}
    sizes = {"gpu_memory_utilization": 0.1, "max_model_len": 2048}
    llm = LLM(policy, speculative_config=speculation, disable_log_stats=False, **sizes)
    asked = [
        f"State the final answer to the following arithmetic problem: {a} + {b} ="
        for a in range(10, 42)
        for b in range(50, 82)
    ]
    chats = [[{"role": "user", "content": text}] for text in asked]
    llm.chat(chats, SamplingParams(temperature=0, max_tokens=128))
    counts = {metric.name: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}
    drafts = counts["vllm:spec_decode_num_drafts"].value
    # By place: how many drafts were accepted that far or further.
    reached = counts["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    mean = sum(reached) / drafts
    square = sum((2 * place + 1) * count for place, count in enumerate(reached)) / drafts
    error = math.sqrt((square - mean**2) / drafts)
    print(f"accept length {1 + mean:.3f} (standard error {error:.3f}), {drafts} drafts of {DEPTH}")


if __name__ == "__main__":
    main()
