"""What ranks write of a checkpoint, each its own files, and how they open one of any number of ranks.

    1. collect    parameters are gathered, each rank keeps in host memory what it will write  together
    2. write      files, synced, with their fingerprints; an error is kept                    each alone
    3. agree      results are exchanged; an error of one (a full disk) is raised on all       together

All ranks share the folder. It gets its name only when all is written (`write_checkpoint`).
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.learning.checkpoint import Fingerprint, fingerprint, sync
from paceline.learning.distributed.export import PolicyFiles, fill_shards
from paceline.learning.distributed.group import RankGroup
from paceline.learning.distributed.sharding import local, rows_of, whole
from paceline.learning.optimiser import MasterAdamW
from paceline.learning.optimiser_files import OptimiserFiles, shard_file, write_index
from paceline.policy.decoder import Decoder
from paceline.policy.lora import adapter_factors, has_adapters, read_adapters, save_adapters
from paceline.policy.model_files import save_tensors


class NotWritten(OSError):
    """Files that a rank could not write; the message names it."""


@dataclass(frozen=True)
class Files:
    """What a rank has collected and will write."""

    policy: PolicyFiles
    adapters: dict[str, torch.Tensor]  # whole, under PEFT's names; empty without LoRA
    optimiser: MasterAdamW | None  # None: the policy alone


def collect_files(policy: Decoder, optimiser: MasterAdamW | None, group: RankGroup) -> Files:
    """Gathers what the ranks write; all must call it at once."""
    files = PolicyFiles(policy, group.rank, group.count)
    files.collect()
    adapted = optimiser is not None and has_adapters(policy)
    adapters = {name: whole(f).cpu() for name, f in adapter_factors(policy).items()} if adapted else {}
    return Files(files, adapters, optimiser)


def write_files(files: Files, folder: Path, tokenizer_from: Path, group: RankGroup) -> dict[str, Fingerprint]:
    """Writes this rank's files, and returns the fingerprints of all ranks' once all have."""
    found: dict[str, Fingerprint] = {}
    error = ""
    try:
        for path in _write(files, folder, tokenizer_from, group):
            sync(path)
            found[str(path.relative_to(folder))] = fingerprint(path)
    except (OSError, RuntimeError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    reports = [json.loads(text) for text in group.texts(json.dumps({"error": error, "files": found}))]

    def check() -> None:
        for rank, report in enumerate(reports):
            if report["error"]:
                raise NotWritten(f"rank {rank} could not write its files in {folder}: {report['error']}")
            unseen = [name for name in report["files"] if not (folder / name).is_file()]
            if unseen:
                raise NotWritten(
                    f"rank {rank} wrote {unseen[0]}, which rank 0 does not find in {folder}: checkpoints "
                    "need a folder that all ranks share"
                )

    group.decide(check)
    return {name: mark for report in reports for name, mark in report["files"].items()}


def _write(files: Files, folder: Path, tokenizer_from: Path, group: RankGroup) -> list[Path]:
    optimiser = files.optimiser
    if optimiser is None:
        return files.policy.write(folder, tokenizer_from)
    written = files.policy.write(folder / "policy", tokenizer_from)
    if files.adapters and group.rank == 0:
        save_adapters(files.policy.policy, folder / "adapter", str(tokenizer_from), files.adapters)
        written += sorted((folder / "adapter").iterdir())
    state = {name: tensor.cpu().contiguous() for name, tensor in optimiser.state().items()}
    file = folder / shard_file(group.rank, group.count)
    save_tensors(state, file)
    written.append(file)
    if group.rank == 0:
        write_index(folder, _rows_by_rank(optimiser, group.count))
        written.append(folder / "optimiser.json")
    return written


def _rows_by_rank(optimiser: MasterAdamW, count: int) -> dict[str, list[range]]:
    own = optimiser.rows()
    if count == 1:
        return {name: [rows] for name, rows in own.items()}
    parameters = dict(optimiser.named)
    return {
        name: [rows_of(parameters[name.partition(".")[2]], rank, count) for rank in range(count)]
        for name in own
    }


@torch.no_grad()
def load_files(path: Path, policy: Decoder, optimiser: MasterAdamW, steps: int, group: RankGroup) -> None:
    """Restores this rank's shares from a checkpoint of any number of ranks; all must call it at once."""
    if has_adapters(policy):
        for factor, tensor in read_adapters(policy, path / "adapter"):
            rows = group.rows(factor)
            local(factor).copy_(tensor[rows.start : rows.stop])
        group.merge_adapters(policy)
    else:
        fill_shards(policy, path / "policy", group.rank, group.count)
    optimiser.load_state(OptimiserFiles(path, optimiser.rows()), steps)
