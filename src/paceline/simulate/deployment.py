"""How a model runs: parallelism, precision, the engine's own overheads, and what then fits into memory."""

from dataclasses import dataclass

from paceline.simulate.hardware import Hardware, Origin, Source
from paceline.simulate.model_shape import ModelShape

MEMORY_SHARE = 0.9  # of a device, for weights and cache; the rest is activations, graphs and fragments


@dataclass(frozen=True)
class EngineProfile:
    """What a step costs beside its kernels, fitted to points of each (benchmarks/simulator/h200.py)."""

    name: str
    origin: Origin
    step_seconds: float = 0.0  # per step: launch, scheduling that is not hidden
    row_seconds: float = 0.0  # per running request and step
    prefill_seconds: float = 0.0  # per forward pass of prefill
    graph_tokens: int = 0  # tokens per step up to which launches are captured; 0: always
    eager_layer_seconds: float = 0.0  # per layer of a step that is not captured
    recomputes_on_update: bool = False  # after an update running requests recompute their cache


PACELINE = EngineProfile(
    "paceline",
    Origin(Source.MEASURED, "step: engine minus kernels alone at batch 128 (6.93 - 6.84 ms)"),
    step_seconds=1.0e-4,
    prefill_seconds=5e-4,
    recomputes_on_update=True,
)
VLLM = EngineProfile(
    "vllm",
    Origin(
        Source.FITTED,
        "step and row: vLLM 0.26 at batch 1 and 256; graph limit: its default; "
        "launches of an uncaptured layer: assumed",
    ),
    step_seconds=6.38e-4,
    row_seconds=1.65e-6,
    prefill_seconds=2e-3,
    graph_tokens=512,
    eager_layer_seconds=1.2e-4,
)
KERNELS_ALONE = EngineProfile("kernels", PACELINE.origin)
ENGINES = {engine.name: engine for engine in (PACELINE, VLLM)}


# CPU seconds of the one process that distributes requests, per request: queue, messages, taking completions.
HEAD_REQUEST_SECONDS = 3.7e-4
HEAD_ORIGIN = Origin(
    Source.MEASURED, "CPU seconds, 512 prompt and 2,048 response tokens, two replicas, one aarch64 core"
)


@dataclass(frozen=True)
class Precision:
    """The precision of weights and KV cache; embeddings, head and router stay in 16 bits."""

    weights: str = "bf16"
    kv: str = "bf16"

    @property
    def weight_bytes(self) -> float:
        return 1.0 if self.weights == "fp8" else 2.0

    @property
    def kv_bytes(self) -> float:
        return 1.0 if self.kv == "fp8" else 2.0


@dataclass(frozen=True)
class Parallelism:
    """A replica's `max(tensor, expert)` devices: `tensor` split attention, the experts are dealt to `expert`.

    With expert > tensor the replica's requests are dealt to expert / tensor attention groups that share the
    experts; with expert < tensor each expert is split over tensor / expert devices.
    """

    tensor: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        return max(self.tensor, self.expert)

    @property
    def attention_groups(self) -> int:
        """Returns how many groups of devices compute attention for requests of their own."""
        return self.devices // self.tensor

    @property
    def expert_slices(self) -> int:
        """Returns over how many devices each expert is split."""
        return self.devices // self.expert


@dataclass(frozen=True)
class Deployment:
    """A model on the devices of one replica; making one checks that it fits."""

    hardware: Hardware
    model: ModelShape
    engine: EngineProfile = PACELINE
    precision: Precision = Precision()
    parallelism: Parallelism = Parallelism()

    def __post_init__(self) -> None:
        self._check_split()
        if "fp8" in (self.precision.weights, self.precision.kv) and not self.hardware.has_fp8:
            raise ValueError(
                f"{self.hardware.name} has no FP8 arithmetic in its profile; use weights=bf16 kv=bf16"
            )
        if self.kv_tokens < 1:
            need = self.weight_bytes_per_device / 1e9
            have = MEMORY_SHARE * self.hardware.data_sheet.memory_bytes / 1e9
            raise ValueError(
                f"{self.model.name} needs {need:.0f} GB a device for weights, "
                f"{self.hardware.name} has {have:.0f} GB: raise tp or ep"
            )

    def _check_split(self) -> None:
        model, split = self.model, self.parallelism
        least = min(split.tensor, split.expert)
        if least < 1 or split.devices % least:
            raise ValueError(
                f"tp = {split.tensor}, ep = {split.expert}: both must be at least 1, "
                "and the larger a multiple of the smaller"
            )
        if model.num_heads % split.tensor:
            raise ValueError(
                f"tp = {split.tensor} must divide the {model.num_heads} attention heads of {model.name}"
            )
        if model.num_kv_heads % split.tensor and split.tensor % model.num_kv_heads:
            raise ValueError(
                f"tp = {split.tensor} must divide the {model.num_kv_heads} key-value heads of {model.name}, "
                "or be a multiple of them"
            )
        if split.expert > 1 and (not model.num_experts or model.num_experts % split.expert):
            raise ValueError(
                f"ep = {split.expert} must divide the number of experts of {model.name}, "
                f"which is {model.num_experts}"
            )

    @property
    def weight_bytes_per_device(self) -> float:
        model, split, width = self.model, self.parallelism, self.precision.weight_bytes
        experts = model.num_expert_layers * model.num_experts * model.expert_parameters
        embeddings = model.embedding_parameters
        rest = model.matrix_parameters - experts - embeddings
        return embeddings * 2.0 / split.tensor + rest * width / split.tensor + experts * width / split.devices

    @property
    def kv_bytes_per_token(self) -> float:
        """Returns a token's bytes on all devices of a group; heads that cannot be split are stored twice."""
        copies = max(1, self.parallelism.tensor / self.model.num_kv_heads)
        return self.model.kv_bytes_per_token(self.precision.kv_bytes) * copies

    @property
    def kv_tokens(self) -> int:
        return self.kv_tokens_beside(0.0, 0.0)

    def kv_tokens_beside(self, device_bytes: float, token_bytes: float) -> int:
        """Returns a replica's cache tokens where a drafter takes memory of each device and for each token."""
        taken = self.weight_bytes_per_device + device_bytes
        free = max(0.0, MEMORY_SHARE * self.hardware.data_sheet.memory_bytes - taken)
        split = self.parallelism
        return int(free * split.devices / (self.kv_bytes_per_token + token_bytes * split.tensor))
