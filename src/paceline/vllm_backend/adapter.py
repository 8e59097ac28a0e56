"""The one module that knows vLLM's engine, for the versions that `versions.py` names.

vLLM's own engine core runs in this process and makes a step when asked, so that nothing is generated between
two steps: what `update_weights` does then is between two tokens of every request. On a GPU vLLM begins a step
before it has the tokens of the last one; `settle` ends it first. Several ranks are separate
processes.
"""

import difflib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch

from paceline.types import Request
from paceline.vllm_backend.progress import Progress, RequestRefused, StepStats
from paceline.vllm_backend.settings import DraftSettings, VllmSettings
from paceline.vllm_backend.versions import check_version
from paceline.vllm_backend.weight_file import WeightFile

# Where weights lie for ranks that are separate processes.
SHARED_MEMORY = "/dev/shm"

# The share of a GPU that vLLM finds free before it starts, where the cache's size is given: any.
NO_SHARE = 0.01


class VllmEngine:
    """One vLLM engine, stepped by its owner."""

    def __init__(self, settings: VllmSettings) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vLLM is imported
        import vllm

        check_version(vllm.__version__)
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.version = vllm.__version__
        self.settings = settings
        self._recorder: _Recorder | None = None
        refuse_unknown(settings.engine, [option.name for option in fields(EngineArgs)], self.version)
        arguments = EngineArgs(**engine_arguments(settings))
        self.engine = LLMEngine.from_engine_args(arguments, stat_loggers=[self._make_recorder])
        self._ranks = settings.tensor_parallel * settings.pipeline_parallel
        shared = self._everywhere("paceline_shared_with_policy")[0]
        assert not shared, f"the drafter shares {shared} with the policy"

    # -- requests ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request; raises where vLLM refuses it."""
        try:
            params = self._sampling_params(request)
            self.engine.add_request(request.id, {"prompt_token_ids": list(request.prompt)}, params)
        except Exception as error:  # its exception types differ between versions
            raise RequestRefused(f"vLLM {self.version}: {error}") from None

    def abort(self, ids: Sequence[str]) -> None:
        self.engine.abort_request(list(ids))

    @property
    def busy(self) -> bool:
        return bool(self.engine.has_unfinished_requests())

    def step(self) -> tuple[list[Progress], StepStats | None]:
        """Makes one step; returns what it added, and what it did where it ran the policy."""
        begun = time.perf_counter()
        outputs = self.engine.step()
        seconds = time.perf_counter() - begun
        stats = self._recorder.take(seconds) if self._recorder is not None else None
        return [_progress(output) for output in outputs], stats

    def settle(self) -> Iterator[tuple[list[Progress], StepStats | None]]:
        """Finishes the steps that vLLM began ahead and starts no other; yields what each would have returned.

        Without it vLLM drops as many of a request's next steps as tokens were under way, which is right only
        where a step gives one.
        """
        core = self.engine.engine_core.engine_core
        if not core.batch_queue:
            return
        core.pause_scheduler("keep", clear_cache=False)
        try:
            while core.batch_queue:
                yield self.step()
        finally:
            core.resume_scheduler()

    def add_text(self, name: str, tokens: Sequence[int]) -> None:
        """Queues a text whose tokens' logprobs are wanted; its progress has them, all but the first's."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": list(tokens)}, params)

    # -- weights ----------------------------------------------------------------------------------

    def load_policy(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces the policy's weights; every cache of theirs is dropped."""
        self._load("paceline_load_policy", weights)

    def load_drafter(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces the drafter's weights; its part of the cache goes with the policy's."""
        self._load("paceline_load_drafter", weights)

    def sleep(self) -> None:
        """Releases the GPU's memory: weights, the drafter's too, go to the host, the cache is dropped."""
        self.engine.reset_prefix_cache(reset_running_requests=True)
        self.engine.sleep(level=1, mode="keep")

    def wake(self) -> None:
        """Allocates the memory again and restores the weights."""
        self.engine.wake_up()

    def close(self) -> None:
        """Ends vLLM's processes."""
        self.engine.engine_core.shutdown()

    def _load(self, method: str, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Sends weights to every rank; several ranks are separate processes."""
        if self._ranks == 1:
            self._everywhere(method, list(weights))
        else:
            from safetensors.torch import save_file

            folder = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".safetensors") as file:
                save_file({name: tensor.contiguous() for name, tensor in weights}, file.name)
                self._everywhere(method, WeightFile(file.name))
        # What runs is queued again and computes its cache anew; without it old keys and values stay.
        self.engine.reset_prefix_cache(reset_running_requests=True)

    def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        return list(self.engine.collective_rpc(method, args=arguments))

    def _sampling_params(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        ends = () if sampling.ignore_eos else self.settings.eos_token_ids
        room = self.settings.max_positions - len(request.prompt)
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=request.seed if self.settings.request_seeds else None,
            max_tokens=max(1, min(sampling.max_tokens, room)),
            stop_token_ids=sorted({*sampling.stop_token_ids, *ends}),
            ignore_eos=True,  # end tokens are stop tokens here, so that their list is the policy's own
            logprobs=sampling.top_logprobs,
            detokenize=False,  # stop texts are looked for by the owner, token by token
            output_kind=RequestOutputKind.DELTA,
        )

    def _make_recorder(self, config: Any, index: int = 0) -> "_Recorder":
        self._recorder = _make_recorder()
        return self._recorder


def refuse_unknown(given: Iterable[str], known: Sequence[str], version: str) -> None:
    """Raises where the recipe gives an option that this vLLM does not have."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"rollout.vllm.engine.{key}: vLLM {version} has no such option{hint}")


def engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Returns the options of vLLM's engine: the recipe's own, those passed through, those relied upon."""
    arguments: dict[str, Any] = {
        "model": settings.folder,
        "dtype": settings.dtype,
        "max_model_len": settings.max_positions,
        "max_num_seqs": settings.max_running,
        "max_num_batched_tokens": settings.prefill_tokens,
        "seed": settings.seed % (1 << 31),
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "enable_expert_parallel": settings.expert_parallel,
        "enable_sleep_mode": settings.sleeps,
        "generation_config": "vllm",  # defaults of its own would change what is sampled
    }
    if settings.kv_bytes:
        # It would refuse to start beside a learner that has more than a tenth of the GPU.
        arguments |= {"kv_cache_memory_bytes": settings.kv_bytes, "gpu_memory_utilization": NO_SHARE}
    if settings.draft is not None:
        arguments["speculative_config"] = speculative_options(settings.draft, settings.max_running)
    relied_upon = {
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "paceline.vllm_backend.extension.WorkerExtension",
        "disable_log_stats": False,
    }
    return arguments | settings.engine | relied_upon


def speculative_options(draft: DraftSettings, max_running: int) -> dict[str, Any]:
    """Returns vLLM's `speculative_config`; `max_running` is the largest batch that there can be."""
    options: dict[str, Any] = {"method": draft.method, "num_speculative_tokens": draft.tokens}
    if draft.folder:
        options["model"] = draft.folder
    if 0 < draft.max_running < max_running:
        options["num_speculative_tokens_per_batch_size"] = [
            (1, draft.max_running, draft.tokens),
            (draft.max_running + 1, max_running, 0),
        ]
    return options | draft.options


def _progress(output: Any) -> Progress:
    part = output.outputs[0]
    tokens = list(part.token_ids)
    candidates = part.logprobs or []
    logprobs = [float(found[token].logprob) for token, found in zip(tokens, candidates, strict=False)]
    tops = [{token: float(entry.logprob) for token, entry in found.items()} for found in candidates]
    read = [
        float(found[token].logprob)
        for token, found in zip(output.prompt_token_ids or (), output.prompt_logprobs or (), strict=False)
        if found is not None
    ]
    return Progress(output.request_id, tokens, logprobs, tops, part.finish_reason or "", read)


class _Recorder:
    """Keeps the statistics that vLLM reports at each step until `take`."""

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._iteration: Any = None

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Called by vLLM after each step."""
        self._scheduler = scheduler_stats
        self._iteration = iteration_stats

    def take(self, seconds: float) -> StepStats | None:
        """Returns what was recorded since the last call."""
        scheduler, iteration = self._scheduler, self._iteration
        self._scheduler = self._iteration = None
        if scheduler is None:
            return None
        stats = StepStats(seconds)
        drafts = scheduler.spec_decoding_stats
        if drafts is not None:
            stats.drafts = drafts.num_drafts
            stats.proposed = drafts.num_draft_tokens
            stats.accepted_at = list(drafts.num_accepted_tokens_per_pos)
        if iteration is not None:
            stats.prompt_tokens = iteration.num_prompt_tokens
            stats.preemptions = iteration.num_preempted_reqs
        return stats

    def log_engine_initialized(self) -> None:
        """Does nothing."""

    def log(self) -> None:
        """Does nothing."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Does nothing."""


def _make_recorder() -> _Recorder:
    """Returns a recorder that is a vLLM `StatLoggerBase`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    StatLoggerBase.register(_Recorder)
    return _Recorder()
