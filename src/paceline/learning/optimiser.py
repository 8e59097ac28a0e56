"""AdamW over float32 master weights: a bf16 weight would round a step of 1e-6 away.

Parameters that are float32 (or wider) are their own masters, unless they are rounded further after a step
(`rounded.py`). Others get a float32 copy, which is what is optimised; the result is rounded back into the
parameter's own storage, so that every reader of that storage sees the new weights.

A step is one launch per parameter on a GPU (kernels/adamw.py) and takes no memory of its own. Of parameters
that are sharded over ranks, each rank keeps and updates its own share; they are clipped by the norm of all.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch.profiler import record_function

from paceline.config import LearningConfig
from paceline.kernels.adamw import AdamWStep
from paceline.learning.optimiser_state import ParameterState, make_state
from paceline.learning.ranks import ONE_RANK, Ranks

# Marks a step in a profile.
OPTIMISER_LABEL = "paceline::optimiser"

# Added to the gradient norm before dividing by it.
NORM_EPSILON = 1e-6


class MasterAdamW:
    """AdamW with master weights, gradient clipping and the recipe's learning rate schedule."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        config: LearningConfig,
        total_steps: int,
        ranks: Ranks = ONE_RANK,
        rounded: frozenset[str] = frozenset(),
    ) -> None:
        """`rounded` names the parameters that something else rounds after each step."""
        self.rounded = rounded
        self.named = [(name, p) for name, p in parameters if p.requires_grad]
        self.config = config
        self.total_steps = total_steps
        self.ranks = ranks
        with torch.no_grad():
            self.local = [ranks.local(p) for _, p in self.named]
        self.states = [self.make_state(name, p) for (name, _), p in zip(self.named, self.local, strict=True)]
        self.steps = 0

    def make_state(self, name: str, parameter: torch.Tensor) -> ParameterState:
        return make_state(self.config.optimiser_state, parameter, own_master=name not in self.rounded)

    @property
    def learning_rate(self) -> float:
        """Returns the learning rate of the step about to be taken."""
        config = self.config
        step = self.steps
        if step < config.warmup_steps:
            return config.lr * (step + 1) / config.warmup_steps
        progress = min(1.0, (step - config.warmup_steps) / max(1, self.total_steps - config.warmup_steps))
        factor = {
            "constant": 1.0,
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        }
        return config.lr * factor[config.lr_schedule]

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> float:
        """Scales and clips the gradients, updates the weights, discards the gradients.

        Returns the gradient norm before clipping. A norm that is not finite leaves weights and moments as
        they were: the caller reports the skipped step.
        """
        with record_function(OPTIMISER_LABEL):
            return self._step(scale)

    def _step(self, scale: float) -> float:
        norm = scale * self.ranks.norm(self._norms(), self._device())
        if torch.isfinite(norm):
            clip = torch.clamp(self.config.max_grad_norm / (norm + NORM_EPSILON), max=1.0)
            self._adamw(scale * clip)
        self.discard_gradients()
        return float(norm)

    def _device(self) -> torch.device:
        return self.local[0].device if self.local else torch.device("cpu")

    def _gradients(self) -> list[torch.Tensor | None]:
        return [None if p.grad is None else self.ranks.local(p.grad) for _, p in self.named]

    def _norms(self) -> list[torch.Tensor]:
        found = [
            (gradient, state.master.dtype)
            for state, gradient in zip(self.states, self._gradients(), strict=True)
            if gradient is not None
        ]
        if found and found[0][0].is_cuda and all(dtype == torch.float32 for _, dtype in found):
            return list(torch._foreach_norm([gradient for gradient, _ in found], 2, dtype=torch.float32))
        return [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient, dtype in found]

    def discard_gradients(self) -> None:
        for _, parameter in self.named:
            parameter.grad = None

    def _adamw(self, scale: torch.Tensor) -> None:
        """Takes a step with `scale` times the gradients; weight decay is for matrices only."""
        config = self.config
        lr = self.learning_rate
        self.steps += 1
        for_matrices = AdamWStep(self.steps, lr, config.beta1, config.beta2, config.weight_decay)
        for_vectors = replace(for_matrices, weight_decay=0.0)
        for parameter, gradient, state in zip(self.local, self._gradients(), self.states, strict=True):
            if parameter.numel():  # a rank's share may be empty
                state.step(parameter, gradient, scale, for_matrices if parameter.ndim > 1 else for_vectors)

    def state(self) -> dict[str, torch.Tensor]:
        """Returns moments and masters by name, masters only where they are not the parameters themselves."""
        tensors: dict[str, torch.Tensor] = {}
        for (name, _), parameter, state in zip(self.named, self.local, self.states, strict=True):
            tensors |= {f"{kind}.{name}": tensor for kind, tensor in state.moments().items()}
            if state.master.dtype != parameter.dtype:
                tensors[f"master.{name}"] = state.master
        return tensors

    def masters(self) -> dict[str, torch.Tensor]:
        """Returns this rank's share of the weights in their masters' types, by name."""
        return {name: state.master for (name, _), state in zip(self.named, self.states, strict=True)}

    @torch.no_grad()
    def load_masters(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replaces the weights by those that `masters` returned; keeps the current moments."""
        for (name, _), parameter, state in zip(self.named, self.local, self.states, strict=True):
            parameter.copy_(weights[name])
            state.master.copy_(weights[name])  # the parameter itself where that is wide enough

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Writes the masters into the parameters, rounded to the parameters' own type alone."""
        for parameter, state in zip(self.local, self.states, strict=True):
            parameter.copy_(state.master)

    def rows(self) -> dict[str, range]:
        """Returns which rows of the whole each tensor of `state` holds; on one rank all of them."""
        first = {name: self.ranks.rows(parameter).start for name, parameter in self.named}
        return {
            name: range(first[name.partition(".")[2]], first[name.partition(".")[2]] + len(tensor))
            for name, tensor in self.state().items()
        }

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        """Restores what `state` returned, and the number of steps taken until then.

        Called when the parameters are restored.
        """
        for name, tensor in self.state().items():
            tensor.copy_(tensors[name])
        for parameter, state in zip(self.local, self.states, strict=True):
            if state.master.dtype == parameter.dtype:  # the checkpoint's policy has it
                state.master.copy_(parameter)
        self.steps = steps
