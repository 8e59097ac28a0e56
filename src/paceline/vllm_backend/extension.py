"""What runs inside vLLM's worker processes: loading weights into the policy and its drafter.

vLLM mixes this class into its worker (`worker_extension_cls`), so its methods are reached by
`collective_rpc` in every rank. Tensors arrive as they are where the worker is in the caller's process, else
as a file that all processes map.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from paceline.vllm_backend.cache_scales import set_scales, without_scales
from paceline.vllm_backend.patches import apply_patches
from paceline.vllm_backend.weight_file import WeightFile

apply_patches()
# It warns of every module that has nothing to load, such as a rotation's table; a probe checks every update.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

# Names of a drafter's parameters that are the policy's own, on purpose: they follow it.
SHARED_BY_DESIGN = ("embed_tokens.",)


# What travels: tensors under their Hugging Face names, or where they lie.
Weights = Sequence[tuple[str, torch.Tensor]] | WeightFile


class WorkerExtension:
    """Methods added to vLLM's worker."""

    def paceline_load_policy(self, weights: Weights) -> None:
        """Writes new weights into the policy, through its own loader: sharded, packed or quantised anew."""
        from vllm.config import set_current_vllm_config

        model = self.get_model()  # type: ignore[attr-defined]
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            scales = _reload(model, self.model_config, weights)  # type: ignore[attr-defined]
        if scales is not None:
            set_scales(model, scales)

    def paceline_load_drafter(self, weights: Weights) -> None:
        """Writes a trained head into the drafter; the policy's tensors stay as they are."""
        from vllm.config import set_current_vllm_config

        config = self.vllm_config  # type: ignore[attr-defined]
        with set_current_vllm_config(config):
            _reload(self.get_draft_model(), config.speculative_config.draft_model_config, weights)  # type: ignore[attr-defined]

    def paceline_shared_with_policy(self) -> list[str]:
        """Returns the drafter's parameters that lie in the policy's memory, beside those that should."""
        drafter = self.get_draft_model()  # type: ignore[attr-defined]
        if drafter is None:
            return []
        policy = self.get_model()  # type: ignore[attr-defined]
        places = {parameter.data_ptr() for parameter in policy.parameters() if parameter.numel()}
        shared = [name for name, parameter in drafter.named_parameters() if parameter.data_ptr() in places]
        return [name for name in shared if not any(part in name for part in SHARED_BY_DESIGN)]


def _reload(model: Any, model_config: Any, weights: Weights) -> torch.Tensor | None:
    """Loads weights in the checkpoint's format into the storage that graphs have captured.

    Returns the cache's scales, where they came with them.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    scales: list[torch.Tensor] = []
    initialize_layerwise_reload(model)
    model.load_weights(without_scales(weights.read() if isinstance(weights, WeightFile) else weights, scales))
    finalize_layerwise_reload(model, model_config)
    _pack_tied_head(model)
    if torch.cuda.is_initialized():  # what was read may be the learner's own memory, which it updates next
        torch.cuda.synchronize()
    return scales[0].cpu() if scales else None


def _pack_tied_head(model: torch.nn.Module) -> None:
    """Packs a tied LM head again on a CPU: vLLM reloads the embedding and leaves the head's packed copy."""
    from vllm.platforms import current_platform

    head = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    if not current_platform.is_cpu() or weight is None:
        return
    others = (module for module in model.modules() if module is not head)
    if any(getattr(module, "weight", None) is weight for module in others):
        head.quant_method.process_weights_after_loading(head)
