"""The section `cluster`: how many processes a run has, where they run, and how weights reach them."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from paceline.config.section import MOST_SECONDS, Section

if TYPE_CHECKING:
    from paceline.config.recipe import Config


class ClusterConfig(Section):
    """Replicas that generate and ranks that learn, each in a process of its own (docs/modes.md)."""

    replicas: int = Field(
        0, ge=0, le=4096, description="processes that generate; 0: the run's own process does"
    )
    learners: int = Field(
        0, ge=0, le=4096, description="FSDP2 ranks that learn; 0: the run's own process learns"
    )
    placement: Literal["apart", "colocated"] = Field(
        "apart",
        description="apart: replicas and learners have GPUs of their own; colocated: each GPU has one of "
        "both, and the replica gives its cache's memory back while the policy learns",
    )
    runtime: Literal["processes", "ray"] = Field(
        "processes",
        description="processes: all on this machine; ray: where a Ray cluster has room (`paceline launch`)",
    )
    transport: Literal["auto", "memory", "ipc", "broadcast"] = Field(
        "auto",
        description="how weights reach replicas, or vLLM; memory: shared host memory of one machine; "
        "ipc: CUDA IPC on one machine; broadcast: NCCL, on a CPU gloo; auto: the fastest that reaches all",
    )
    retries: int = Field(
        3, ge=0, le=1000, description="how often a request may run again because its replica was lost"
    )
    restarts: int = Field(
        3,
        ge=0,
        le=1000,
        description="how often a process that finishes nothing is replaced before it is given up",
    )
    heartbeat_seconds: float = Field(
        120.0,
        gt=0,
        le=MOST_SECONDS,
        description="a process that has not answered for so long is taken to hang and replaced",
    )
    collective_seconds: float = Field(
        600.0,
        gt=0,
        le=MOST_SECONDS,
        description="how long ranks wait for one another before the missing one is named",
    )

    @property
    def gpus(self) -> int:
        """The GPUs that all processes together need, the run's own included where it learns."""
        learning = max(1, self.learners)
        return max(learning, self.replicas) if self.placement == "colocated" else learning + self.replicas

    @model_validator(mode="after")
    def _keys_apply(self) -> "ClusterConfig":
        if self.replicas or self.learners:
            return self
        # `transport` also applies to vLLM, which only the whole recipe knows.
        for key in type(self).model_fields:
            if key not in ("replicas", "learners", "transport"):
                self._check_unused(key)
        return self

    def _check_unused(self, key: str) -> None:
        why = "cluster.replicas is 0, everything runs in one process; set cluster.replicas"
        self.refuse_unused("cluster", (key,), why)

    @model_validator(mode="after")
    def _placement_fits(self) -> "ClusterConfig":
        learning = max(1, self.learners)
        if self.placement == "colocated" and self.replicas != learning:
            raise ValueError(
                f"cluster.placement = 'colocated' puts one learner and one replica on each GPU: "
                f"cluster.replicas = {self.replicas} must equal the learners, {learning}; "
                "change one of them, or use cluster.placement=apart"
            )
        if self.transport == "ipc" and self.runtime == "ray" and self.placement == "apart":
            raise ValueError(
                "cluster.transport = 'ipc' reaches processes of one machine, and cluster.runtime = 'ray' "
                "with cluster.placement = 'apart' may use several; use transport=auto or broadcast"
            )
        return self


def check_cluster(config: "Config") -> None:
    """Raises ValueError where a recipe asks for something that several processes do not support."""
    cluster, rollout = config.cluster, config.rollout
    if config.learning.algorithm == "sft":
        return
    if cluster.learners and not cluster.replicas:
        raise ValueError(
            f"cluster.learners = {cluster.learners} needs cluster.replicas of at least 1: with learners in "
            "processes of their own no other process has weights to generate with"
        )
    if not cluster.replicas:
        if rollout.backend != "vllm":
            cluster._check_unused("transport")
        elif cluster.transport == "broadcast":
            raise ValueError(
                "cluster.transport = 'broadcast' does not reach vLLM, whose process is on this machine; use "
                "cluster.transport=memory or auto"
            )
        elif cluster.transport == "ipc" and rollout.vllm.ranks > 1:
            raise ValueError(
                f"cluster.transport = 'ipc' hands weights to one rank, and vLLM has {rollout.vllm.ranks} "
                "(rollout.vllm.tensor_parallel x pipeline_parallel); use cluster.transport=memory or auto"
            )
        return
    where = f"cluster.replicas = {cluster.replicas}"
    if rollout.backend == "vllm":
        raise ValueError(
            f"{where}: with rollout.backend = 'vllm' one engine serves the run; use "
            "rollout.vllm.tensor_parallel, or rollout.backend=native, or cluster.replicas=0"
        )
    if rollout.precision.fp8_kv:
        raise ValueError(
            f"{where}: with rollout.precision = {rollout.precision.value!r} scales are measured in the "
            "learner's forward passes, and generation runs in other processes; use "
            f"rollout.precision={rollout.precision.without_fp8_kv}, or cluster.replicas=0"
        )
    if rollout.mode == "async" and cluster.placement == "colocated":
        raise ValueError(
            "cluster.placement = 'colocated' lets replicas sleep while the policy learns, and rollout.mode = "
            "'async' never stops them; use cluster.placement=apart, or rollout.mode=partial"
        )
