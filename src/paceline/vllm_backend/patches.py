"""Workarounds for defects of vLLM, applied in each of its worker processes (docs/vllm.md).

Each names the defect and does nothing where vLLM does not have, or cannot import, what it replaces.
"""

from typing import Any

import torch


def apply_patches() -> None:
    from vllm.platforms import current_platform

    _keep_drafter_head_apart()
    _keep_drafter_head_apart_on_gpu()
    _keep_hidden_states_from_drafter()
    if current_platform.is_cpu():
        _expand_on_cpu()
        _constrain_nothing_on_cpu()


def _keep_drafter_head_apart() -> None:
    """Keeps an eagle head's own LM head its own.

    vLLM shares the policy's where both are equal when they are loaded, as they are for a head that was
    initialised from the policy: each later update of one would then overwrite the other.
    """
    try:
        from vllm.v1.spec_decode import llm_base_proposer
    except ImportError:
        return
    proposer = llm_base_proposer.SpecDecodeBaseProposer
    share = proposer._maybe_share_lm_head

    def share_unless_own(self: Any, target: torch.nn.Module) -> None:
        if not getattr(self.model, "has_own_lm_head", False):
            share(self, target)

    proposer._maybe_share_lm_head = share_unless_own


def _keep_drafter_head_apart_on_gpu() -> None:
    """Does the same for vLLM's second model runner, which GPUs take for most models."""
    try:
        from vllm.v1.worker.gpu.spec_decode.eagle import utils
    except ImportError:
        return
    should_share = utils._should_share

    def should_share_unless_own(drafter: torch.nn.Module, flag: str, *modules: Any) -> bool:
        own = flag == "has_own_lm_head" and getattr(drafter, flag, False)
        return not own and bool(should_share(drafter, flag, *modules))

    utils._should_share = should_share_unless_own


def _keep_hidden_states_from_drafter() -> None:
    """Copies the hidden states that a prompt's logprobs are computed from before the drafter runs.

    vLLM's first model runner computes a prompt's logprobs after a drafter that is a model. All CUDA graphs
    share one memory pool, so the drafter's may write over the policy's hidden states (vLLM issue 53488).
    What is sampled comes from logits that were computed before it.
    """
    try:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    except ImportError:
        return
    sample_tokens = getattr(GPUModelRunner, "sample_tokens", None)
    if sample_tokens is None:
        return

    def sample_with_copy(self: Any, grammar_output: Any) -> Any:
        state = self.execute_model_state
        if state is not None and self.num_prompt_logprobs and self.speculative_config is not None:
            self.execute_model_state = state._replace(hidden_states=state.hidden_states.clone())
        return sample_tokens(self, grammar_output)

    GPUModelRunner.sample_tokens = sample_with_copy


def _expand_on_cpu() -> None:
    """Repeats a request's temperature, top-k and top-p for its proposed tokens on a CPU.

    vLLM's CPU build converts the result's memory to int64, fills the copy and drops it: proposals are then
    verified at whatever temperature that memory happens to hold.
    """
    from vllm.v1.sample import rejection_sampler

    def expand(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        kept = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        return torch.repeat_interleave(kept, counts.to(torch.int64), output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand


def _constrain_nothing_on_cpu() -> None:
    """Lets a step without any proposal pass on a CPU, where its top-k takes the maximum of nothing."""
    from vllm.v1.sample import rejection_sampler

    constrain = rejection_sampler.apply_sampling_constraints

    def constrain_some(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return constrain(logits, *arguments) if len(logits) else logits

    rejection_sampler.apply_sampling_constraints = constrain_some
