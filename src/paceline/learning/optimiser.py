"""AdamW over float32 masters: a bf16 weight would swallow a step of 1e-6.

Parameters that are float32 (or wider) are their own masters. Others get a float32 copy, which is what is optimised; the
result is rounded back into the parameter's own storage, so whoever reads that storage sees the new weights.
"""

import math
from collections.abc import Iterable

import torch

from paceline.config import LearningConfig


class MasterAdamW:
    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], config: LearningConfig, total_steps: int) -> None:
        self.named = [(name, p) for name, p in parameters if p.requires_grad]
        self.config = config
        self.total_steps = total_steps
        self.masters = [p.detach() if _is_wide(p) else p.detach().float() for _, p in self.named]
        self.first_moments = [torch.zeros_like(m) for m in self.masters]
        self.second_moments = [torch.zeros_like(m) for m in self.masters]
        self.steps = 0

    @property
    def learning_rate(self) -> float:
        """Of the step about to be taken."""
        config, step = self.config, self.steps
        if step < config.warmup_steps:
            return config.lr * (step + 1) / config.warmup_steps
        progress = min(1.0, (step - config.warmup_steps) / max(1, self.total_steps - config.warmup_steps))
        factor = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
        return config.lr * factor[config.lr_schedule]

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> float:
        """Scales, clips, updates, clears the gradients; returns the gradient norm before clipping.

        A norm that is not finite leaves weights and moments as they were: the caller reports the skipped step.
        """
        gradients = [torch.zeros_like(m) if p.grad is None else p.grad.to(m.dtype) for m, (_, p) in zip(self.masters, self.named, strict=True)]
        if scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        norm = torch.nn.utils.get_total_norm(gradients)
        self.discard_gradients()
        if not torch.isfinite(norm):
            return float(norm)
        torch._foreach_mul_(gradients, torch.clamp(self.config.max_grad_norm / (norm + 1e-6), max=1.0))
        self._adamw(gradients)
        for master, (_, parameter) in zip(self.masters, self.named, strict=True):
            if master.data_ptr() != parameter.data_ptr():
                parameter.copy_(master)
        return float(norm)

    def discard_gradients(self) -> None:
        for _, parameter in self.named:
            parameter.grad = None

    def _adamw(self, gradients: list[torch.Tensor]) -> None:
        """Decoupled weight decay (arXiv 1711.05101, algorithm 2), on matrices only."""
        lr, beta1, beta2 = self.learning_rate, self.config.beta1, self.config.beta2
        self.steps += 1
        torch._foreach_lerp_(self.first_moments, gradients, 1 - beta1)
        torch._foreach_mul_(self.second_moments, beta2)
        torch._foreach_addcmul_(self.second_moments, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(self.second_moments)
        torch._foreach_div_(denominators, math.sqrt(1 - beta2**self.steps))
        torch._foreach_add_(denominators, 1e-8)
        matrices = [m for m in self.masters if m.ndim > 1]
        if self.config.weight_decay:
            torch._foreach_mul_(matrices, 1 - lr * self.config.weight_decay)
        torch._foreach_addcdiv_(self.masters, self.first_moments, denominators, -lr / (1 - beta1**self.steps))

    def state(self) -> dict[str, torch.Tensor]:
        """Everything but `steps`, by name; masters only where they are not the parameters themselves."""
        tensors: dict[str, torch.Tensor] = {}
        for (name, parameter), master, first, second in zip(self.named, self.masters, self.first_moments, self.second_moments, strict=True):
            tensors |= {f"first.{name}": first, f"second.{name}": second}
            if master.data_ptr() != parameter.data_ptr():
                tensors[f"master.{name}"] = master
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, torch.Tensor], steps: int) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(tensors[name])
        self.steps = steps


def _is_wide(parameter: torch.Tensor) -> bool:
    return parameter.dtype in (torch.float32, torch.float64)
