"""Runs inside `.venv-vllm`: a policy with an eagle3 drafter in vLLM, and what vLLM says of its drafts.

    .venv-vllm/bin/python vllm_speculate.py job.json result.json

It knows nothing of Paceline; `test_vllm_eagle.py` writes the job and reads the result.
"""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
    "0"  # the engine runs in this process: there is no other to clean up
)

from vllm import LLM, SamplingParams


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    llm = LLM(
        job["policy"],
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=4,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": job["drafter"],
            "num_speculative_tokens": job["depth"],
        }
        | job["settings"],
    )
    results = {}
    before = counters(llm)
    for temperature in job["temperatures"]:
        params = SamplingParams(temperature=temperature, max_tokens=job["max_tokens"])
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in job["prompts"]], params, use_tqdm=False
        )
        after = counters(llm)
        results[str(temperature)] = {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "drafts": after["drafts"] - before["drafts"],
            "accepted_at": [b - a for a, b in zip(before["accepted_at"], after["accepted_at"], strict=True)],
        }
        before = after
    Path(result_path).write_text(json.dumps(results))


def counters(llm: LLM) -> dict:
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return {"drafts": metrics["vllm:spec_decode_num_drafts"].value, "accepted_at": list(accepted)}


if __name__ == "__main__":
    main(*sys.argv[1:])
