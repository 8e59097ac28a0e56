"""Runs inside `.venv-vllm`: opens one folder after the other in vLLM and writes down its greedy continuations.

    .venv-vllm/bin/python vllm_generate.py job.json result.json

It knows nothing of Paceline; what goes in and out is described by `test_vllm.py`. All folders share one process, since
importing vLLM takes longer than opening a small model.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process: nothing else to clean up

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def generate(folder: str, prompts: list[list[int]], max_tokens: int) -> list[dict]:
    has_tokenizer = (Path(folder) / "tokenizer.json").is_file()
    llm = LLM(
        folder, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=64 << 20, max_num_seqs=8, skip_tokenizer_init=not has_tokenizer,
        generation_config="vllm",
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=0, detokenize=has_tokenizer)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    return [describe(output.outputs[0]) for output in outputs]


def describe(sequence) -> dict:
    tokens = list(sequence.token_ids)
    logprobs = [position[token].logprob for token, position in zip(tokens, sequence.logprobs, strict=True)]
    return {"tokens": tokens, "logprobs": logprobs, "finish_reason": sequence.finish_reason, "text": sequence.text}


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    results = {}
    for name, folder in job["folders"].items():
        print(f"== {name}", flush=True)
        results[name] = generate(folder, job["prompts"][name], job["max_tokens"])
        gc.collect()
        cleanup_dist_env_and_memory()
    Path(result_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
