"""How a model runs: parallelism, precision, the engine's own overheads, and what then fits into memory."""

from dataclasses import dataclass

from paceline.simulate.hardware import Hardware, Origin, Source
from paceline.simulate.model_shape import ModelShape

MEMORY_SHARE = 0.9  # of a device, for weights and cache; the rest is activations, graphs and fragments


@dataclass(frozen=True)
class Engine:
    """What a step costs beside the kernels. Fitted to two points of each engine's own table
    (`validation/h200.py`).
    """

    name: str
    step_seconds: float  # per step: launch, scheduling that is not hidden
    row_seconds: float  # per running request and step
    prefill_seconds: float  # per forward pass of prefill
    graph_tokens: int  # tokens per step up to which launches are captured; 0: always
    eager_layer_seconds: float  # per layer of a step that is not captured
    recomputes_on_update: bool  # new weights: the cache of running requests is computed again
    origin: Origin


PACELINE = Engine(
    "paceline",
    1.0e-4,
    0.0,
    5e-4,
    0,
    0.0,
    True,
    Origin(Source.MEASURED, "step: engine minus kernels alone at batch 128 (6.93 - 6.84 ms)"),
)
VLLM = Engine(
    "vllm",
    6.38e-4,
    1.65e-6,
    2e-3,
    512,
    1.2e-4,
    False,
    Origin(
        Source.FITTED,
        "step and row: vLLM 0.26 at batch 1 and 256; graph limit: its default; launches of an uncaptured "
        "layer: assumed",
    ),
)
KERNELS_ALONE = Engine("kernels", 0.0, 0.0, 0.0, 0, 0.0, False, PACELINE.origin)
ENGINES = {engine.name: engine for engine in (PACELINE, VLLM)}


@dataclass(frozen=True)
class Precision:
    weights: str = "bf16"  # bf16 or fp8; embeddings, head and router stay in 16 bits
    kv: str = "bf16"

    @property
    def weight_bytes(self) -> float:
        return 1.0 if self.weights == "fp8" else 2.0

    @property
    def kv_bytes(self) -> float:
        return 1.0 if self.kv == "fp8" else 2.0


@dataclass(frozen=True)
class Parallelism:
    """A replica is `max(tensor, expert)` devices: attention is cut over `tensor` of them, whole experts lie
    on `expert`.

    With expert > tensor the replica's requests are dealt to expert / tensor attention groups that share the
    experts.
    """

    tensor: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        return max(self.tensor, self.expert)

    @property
    def attention_groups(self) -> int:
        return self.devices // self.tensor


@dataclass(frozen=True)
class Deployment:
    hardware: Hardware
    model: ModelShape
    engine: Engine
    precision: Precision
    parallelism: Parallelism

    def __post_init__(self) -> None:
        model, split, hardware = self.model, self.parallelism, self.hardware
        if split.tensor < 1 or split.expert < 1 or split.devices % split.tensor:
            raise ValueError(
                f"tp = {split.tensor}, ep = {split.expert}: both must be at least 1 and ep a multiple of tp "
                "where it is larger"
            )
        if model.heads % split.tensor:
            raise ValueError(
                f"tp = {split.tensor} must divide the {model.heads} attention heads of {model.name}"
            )
        if split.expert > 1 and (not model.experts or model.experts % split.expert):
            raise ValueError(
                f"ep = {split.expert} must divide the number of experts of {model.name}, which is "
                f"{model.experts}"
            )
        if "fp8" in (self.precision.weights, self.precision.kv) and not hardware.has_fp8:
            raise ValueError(
                f"{hardware.name} has no FP8 arithmetic in its profile; use --weights bf16 --kv bf16"
            )
        if self.kv_tokens < 1:
            need, have = (
                self.weight_bytes_per_device / 1e9,
                MEMORY_SHARE * hardware.data_sheet.memory_bytes / 1e9,
            )
            raise ValueError(
                f"{model.name} needs {need:.0f} GB a device for weights, {hardware.name} has {have:.0f} GB: "
                "raise --tp or --ep"
            )

    @property
    def weight_bytes_per_device(self) -> float:
        model, split, width = self.model, self.parallelism, self.precision.weight_bytes
        experts = model.expert_layers * model.experts * model.expert_parameters
        embeddings = model.vocab * model.hidden * (1 if model.tied else 2)
        rest = model.parameters - experts - embeddings
        return embeddings * 2.0 / split.tensor + rest * width / split.tensor + experts * width / split.devices

    @property
    def kv_bytes_per_token(self) -> float:
        """On all devices of an attention group together; heads that cannot be cut further are stored
        twice.
        """
        copies = max(1, self.parallelism.tensor / self.model.kv_heads)
        return self.model.kv_bytes_per_token(self.precision.kv_bytes) * copies

    @property
    def kv_tokens(self) -> int:
        """That a whole replica holds."""
        room = MEMORY_SHARE * self.hardware.data_sheet.memory_bytes - self.weight_bytes_per_device
        return int(room * self.parallelism.devices / self.kv_bytes_per_token)

    @property
    def sync_bytes_per_device(self) -> float:
        return self.weight_bytes_per_device
