"""Runs inside `.venv-vllm`: opens one folder after the other in vLLM and writes down its greedy
continuations.

    .venv-vllm/bin/python vllm_generate.py job.json result.json

It knows nothing of Paceline; `test_vllm.py` writes the job and reads the result. All folders share one
process, since importing vLLM takes longer than opening a small model.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
    "0"  # the engine runs in this process: there is no other to clean up
)

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.outputs import CompletionOutput


def generate(folder: str, prompts: list[list[int]], max_tokens: int) -> list[dict]:
    llm = LLM(folder, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=64 << 20, max_num_seqs=4)
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=0)  # 0: only the sampled token's
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    return [describe(output.outputs[0]) for output in outputs]


def describe(output: CompletionOutput) -> dict:
    tokens = list(output.token_ids)
    logprobs = [candidates[token].logprob for token, candidates in zip(tokens, output.logprobs, strict=True)]
    return {
        "tokens": tokens,
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "text": output.text,
    }


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    results = {}
    for name, case in job["cases"].items():
        print(f"== {name}", flush=True)
        results[name] = generate(case["folder"], case["prompts"], job["max_tokens"])
        gc.collect()  # one engine at a time: the next one sets up torch.distributed again
        cleanup_dist_env_and_memory()
    Path(result_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
