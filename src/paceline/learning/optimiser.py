"""AdamW over float32 master weights: a bf16 weight would round a step of 1e-6 away.

Parameters that are float32 (or wider) are their own masters. Others get a float32 copy, which is what is
optimised; the result is rounded back into the parameter's own storage, so that all who share that storage see
the new weights.

A step goes through the parameters in pieces of bounded size. For all of an 8B model at once, float32
gradients and denominators would take 65 GB beside the 131 GB of weights, masters, moments and bf16 gradients;
in pieces they take half a gigabyte.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from paceline.config import LearningConfig

# Elements that a step works on at a time: 256 MiB of float32 gradients, and as much for the denominators.
PIECE_ELEMENTS = 1 << 26

# Added to the root of the second moment.
ADAM_EPSILON = 1e-8

# Added to the gradient norm before dividing by it.
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Piece:
    """Elements `[start, stop)` of a parameter, flattened."""

    index: int
    start: int
    stop: int


class MasterAdamW:
    """AdamW with master weights, gradient clipping and the recipe's learning rate schedule."""

    def __init__(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], config: LearningConfig, total_steps: int
    ) -> None:
        self.named = [(name, p) for name, p in parameters if p.requires_grad]
        self.config = config
        self.total_steps = total_steps
        self.masters = [p.detach() if _is_wide(p) else p.detach().float() for _, p in self.named]
        self.first_moments = [torch.zeros_like(m) for m in self.masters]
        self.second_moments = [torch.zeros_like(m) for m in self.masters]
        self.steps = 0
        self._pieces = cut_into_pieces([m.numel() for m in self.masters], PIECE_ELEMENTS)

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
        norms = [
            torch.linalg.vector_norm(p.grad, dtype=m.dtype)
            for m, (_, p) in zip(self.masters, self.named, strict=True)
            if p.grad is not None
        ]
        norm = scale * torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        if torch.isfinite(norm):
            clip = torch.clamp(self.config.max_grad_norm / (norm + NORM_EPSILON), max=1.0)
            self._adamw(scale * clip)
            for master, (_, parameter) in zip(self.masters, self.named, strict=True):
                if master.data_ptr() != parameter.data_ptr():
                    parameter.copy_(master)
        self.discard_gradients()
        return float(norm)

    def discard_gradients(self) -> None:
        """Releases the gradients."""
        for _, parameter in self.named:
            parameter.grad = None

    def _adamw(self, scale: torch.Tensor) -> None:
        """Takes a step with `scale` times the gradients.

        Weight decay is decoupled (arXiv 1711.05101, algorithm 2) and on matrices only.
        """
        lr = self.learning_rate
        beta1 = self.config.beta1
        beta2 = self.config.beta2
        self.steps += 1
        for pieces in self._pieces:
            masters, first, second = (
                self._flat(tensors, pieces)
                for tensors in (self.masters, self.first_moments, self.second_moments)
            )
            gradients = [self._gradient(piece) for piece in pieces]
            torch._foreach_mul_(gradients, scale)
            torch._foreach_lerp_(first, gradients, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
            denominators = torch._foreach_sqrt(second)
            torch._foreach_div_(denominators, math.sqrt(1 - beta2**self.steps))
            torch._foreach_add_(denominators, ADAM_EPSILON)
            matrices = [
                m for m, piece in zip(masters, pieces, strict=True) if self.masters[piece.index].ndim > 1
            ]
            if self.config.weight_decay and matrices:
                torch._foreach_mul_(matrices, 1 - lr * self.config.weight_decay)
            torch._foreach_addcdiv_(masters, first, denominators, -lr / (1 - beta1**self.steps))

    def _flat(self, tensors: list[torch.Tensor], pieces: list[Piece]) -> list[torch.Tensor]:
        return [tensors[piece.index].view(-1)[piece.start : piece.stop] for piece in pieces]

    def _gradient(self, piece: Piece) -> torch.Tensor:
        """Returns a piece of a gradient in the master's type; zeros for a parameter that has none."""
        master = self.masters[piece.index]
        _, parameter = self.named[piece.index]
        if parameter.grad is None:
            return master.new_zeros(piece.stop - piece.start)
        return parameter.grad.reshape(-1)[piece.start : piece.stop].to(master.dtype)

    def state(self) -> dict[str, torch.Tensor]:
        """Returns moments and masters by name, masters only where they are not the parameters themselves."""
        tensors: dict[str, torch.Tensor] = {}
        for (name, parameter), master, first, second in zip(
            self.named, self.masters, self.first_moments, self.second_moments, strict=True
        ):
            tensors |= {f"first.{name}": first, f"second.{name}": second}
            if master.data_ptr() != parameter.data_ptr():
                tensors[f"master.{name}"] = master
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, torch.Tensor], steps: int) -> None:
        """Takes over what `state` returned, and the number of steps taken until then."""
        for name, tensor in self.state().items():
            tensor.copy_(tensors[name])
        self.steps = steps


def cut_into_pieces(sizes: list[int], limit: int) -> list[list[Piece]]:
    """Returns groups of pieces with at most `limit` elements together, in order.

    A large parameter is cut, small ones share a group.
    """
    groups: list[list[Piece]] = [[]]
    room = limit
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                groups.append([])
                room = limit
            stop = min(size, start + room)
            groups[-1].append(Piece(index, start, stop))
            room -= stop - start
            start = stop
    return [group for group in groups if group]


def _is_wide(parameter: torch.Tensor) -> bool:
    return parameter.dtype in (torch.float32, torch.float64)
