"""The recipe's `rollout.vllm`: where vLLM is and how it runs, and what it does not support."""

from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from paceline.config.drafters import NATIVE, VLLM
from paceline.config.section import Section
from paceline.types import Precision

if TYPE_CHECKING:
    from paceline.config.rollout import RolloutConfig

# Options of vLLM's engine that the recipe sets elsewhere, or that Paceline relies on, and what to do instead.
OWN_OPTIONS = {
    "model": "use policy.path",
    "tokenizer": "use policy.path",
    "dtype": "use policy.dtype",
    "seed": "use run.seed",
    "max_num_seqs": "use rollout.max_running",
    "max_num_batched_tokens": "use rollout.prefill_tokens",
    "tensor_parallel_size": "use rollout.vllm.tensor_parallel",
    "pipeline_parallel_size": "use rollout.vllm.pipeline_parallel",
    "enable_expert_parallel": "use rollout.vllm.expert_parallel",
    "speculative_config": "use rollout.speculation, and rollout.vllm.speculative for the rest",
    "logprobs_mode": "leave it out: logprobs must be those of the distribution that was sampled",
    "worker_extension_cls": "leave it out: weights are updated through it",
    "disable_log_stats": "leave it out: acceptance is read from the statistics",
    "data_parallel_size": "leave it out: one engine is one replica",
}

# The same of vLLM's `speculative_config`.
OWN_SPECULATIVE_OPTIONS = {
    "method": "use rollout.speculation.drafters",
    "num_speculative_tokens": "use rollout.speculation.tokens",
    "num_speculative_tokens_per_batch_size": "use rollout.speculation.max_running",
}


class VllmConfig(Section):
    """The section `rollout.vllm`: vLLM's environment, its parallelism, and options passed through."""

    python: str = Field(
        ".venv-vllm/bin/python",
        description="the Python of an environment with vLLM (`scripts/vllm_env.sh` makes this one)",
    )
    tensor_parallel: int = Field(1, ge=1, description="GPUs that share each layer")
    pipeline_parallel: int = Field(1, ge=1, description="groups of GPUs that share the layers")
    expert_parallel: bool = Field(False, description="MoE policies: experts are spread over the GPUs")
    request_seeds: bool = Field(
        True,
        description="each request has a generator of its own, with its own seed; false: one for all, which "
        "costs less at large batches",
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="options of vLLM's engine, as it names them, such as {quantization: fp8}",
    )
    speculative: dict[str, Any] = Field(
        default_factory=dict,
        description="options of vLLM's speculative_config, as it names them, such as {prompt_lookup_max: 4}",
    )

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @model_validator(mode="after")
    def _options_are_free(self) -> "VllmConfig":
        for section, own in (("engine", OWN_OPTIONS), ("speculative", OWN_SPECULATIVE_OPTIONS)):
            for key, value in getattr(self, section).items():
                if key in own:
                    raise ValueError(f"rollout.vllm.{section}.{key} = {value!r}: {own[key]}")
        sleeps = self.engine.get("enable_sleep_mode", False)
        if sleeps is not False:
            raise ValueError(
                f"rollout.vllm.engine.enable_sleep_mode = {sleeps!r}: vLLM sleeps by itself where the policy "
                "learns on its GPU; false keeps it awake, else leave it out"
            )
        return self


def vllm_problem(rollout: "RolloutConfig") -> str:
    """Returns the error of a recipe that vLLM does not support, or only vLLM does; empty: none."""
    return (
        _not_vllm(rollout) if rollout.backend != "vllm" else _rollout_problem(rollout) or _drafting(rollout)
    )


def _not_vllm(rollout: "RolloutConfig") -> str:
    only = [name for name in rollout.speculation.drafters if name not in NATIVE]
    if only:
        return (
            f"rollout.speculation.drafters = {rollout.speculation.drafters}: {only[0]!r} is vLLM's, and "
            f"rollout.backend = {rollout.backend!r}; use history, eagle or draft_model, or "
            "rollout.backend=vllm"
        )
    given = [key for key in VllmConfig.model_fields if not rollout.vllm.is_default(key)]
    if given:
        value = getattr(rollout.vllm, given[0])
        return (
            f"rollout.vllm.{given[0]} = {value!r} does not apply: rollout.backend = {rollout.backend!r}; "
            "use rollout.backend=vllm, or leave it out"
        )
    return ""


def _rollout_problem(rollout: "RolloutConfig") -> str:
    refused = {
        "admission": "vLLM starts requests in the order they come; use rollout.admission=fifo",
        "deterministic": "vLLM's kernels round differently in other batches; leave it out, or use "
        "rollout.backend=native",
        "graph_memory_gb": "vLLM plans its graphs by itself (rollout.vllm.engine takes its options); "
        "leave it out",
    }
    for key, reason in refused.items():
        if not rollout.is_default(key):
            given = f"rollout.{key} = {getattr(rollout, key)!r}"
            return f"{given} does not apply to rollout.backend = 'vllm': {reason}"
    if rollout.precision is not Precision.BASE:
        return (
            f"rollout.precision = {rollout.precision.value!r} is a precision of the native engine; with "
            "rollout.backend = 'vllm' leave it out and say how vLLM quantises, such as "
            "rollout.vllm.engine={quantization: fp8}"
        )
    return ""


def _drafting(rollout: "RolloutConfig") -> str:
    speculation = rollout.speculation
    drafters = speculation.drafters
    if not drafters and rollout.vllm.speculative:
        return (
            f"rollout.vllm.speculative = {rollout.vllm.speculative} does not apply: "
            "rollout.speculation.drafters is empty; name a drafter, or leave it out"
        )
    if not drafters:
        return ""
    named = f"rollout.speculation.drafters = {drafters}"
    if len(drafters) > 1:
        return f"{named}: vLLM speculates with one drafter; name one"
    if drafters[0] not in VLLM:
        return (
            f"{named}: {drafters[0]!r} is the native engine's; vLLM has {', '.join(VLLM)}, of which "
            "ngram and suffix propose from earlier text as it does"
        )
    if speculation.verify != "rejection":
        return (
            f"rollout.speculation.verify = {speculation.verify!r}: vLLM draws with noise of its own and "
            "verifies by rejection; use rollout.speculation.verify=rejection"
        )
    if speculation.pacing != "fixed":
        return (
            f"rollout.speculation.pacing = {speculation.pacing!r}: vLLM proposes a fixed number of tokens; "
            "use rollout.speculation.pacing=fixed (and max_running, to stop in large batches)"
        )
    if speculation.shape != "chain":
        return f"rollout.speculation.shape = {speculation.shape!r}: vLLM proposes chains; leave it out"
    if speculation.eagle_precision != "base":
        return (
            f"rollout.speculation.eagle_precision = {speculation.eagle_precision!r}: vLLM runs the head in "
            "its own type; leave it out"
        )
    return ""
