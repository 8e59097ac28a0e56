"""Reading tensors by their Hugging Face name from a folder's safetensors, whole or in shards.

What is stored is checked before it counts as a weight: one set of files, within the folder, of numbers that
are weights as they are or FP8 with scales (`quantised.py`). Nothing here unpickles.
"""

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from paceline.policy.files import DamagedFile, errors_name, read_json
from paceline.policy.quantised import FP8_TYPES, SCALE_SUFFIX, read_quantisation

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The name of one expert's matrix, and that of the tensor in which transformers 5 keeps a layer's experts.
EXPERT_TENSOR = re.compile(
    r"(?P<layer>.+\.mlp\.experts)\.(?P<index>\d+)\.(?P<kind>gate|up|down)_proj\.weight"
)
FUSED_EXPERTS = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.")
# Tensors that no weight depends on: RoPE's table in old checkpoints, scales of quantised activations and KV.
HARMLESS_SUFFIXES = ("rotary_emb.inv_freq", ".input_scale", ".activation_scale", ".k_scale", ".v_scale")
# What a decoder's own tensors begin with; others belong to heads that it does not have.
DECODER_PREFIXES = ("model.", "lm_head.")


class WeightFiles:
    """The tensors of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of = _file_of_tensors(folder)
        config = folder / "config.json"
        self.fp8 = read_quantisation(folder, read_json(config)) if config.is_file() else None
        self.open_files: dict[str, Any] = {}
        self.used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def read(self, name: str) -> torch.Tensor:
        if name in self.file_of:
            with errors_name(self.folder / self.file_of[name]):
                return self._as_weight(name, self._file_with(name).get_tensor(name), self._scale(name))
        expert = EXPERT_TENSOR.fullmatch(name)
        if expert and (fused := f"{expert['layer']}.{FUSED_EXPERTS[expert['kind']]}") in self.file_of:
            with errors_name(self.folder / self.file_of[fused]):
                return self._expert(fused, int(expert["index"]), expert["kind"])
        raise DamagedFile(f"{self.folder} lacks the tensor {name}; it holds {len(self.file_of)} others")

    def shape(self, name: str) -> tuple[int, ...]:
        with errors_name(self.folder / self.file_of[name]):
            return tuple(self._file_with(name).get_slice(name).get_shape())

    def stored_types(self, names: Iterable[str]) -> set[torch.dtype]:
        found = (name for name in names if name in self.file_of)
        return {self._file_with(name).get_slice(name)[:0].dtype for name in found}

    def report_unread(self, num_layers: int) -> None:
        """Raises if an unread tensor would be part of the decoder; warns of any other."""
        unread = [name for name in self.file_of.keys() - self.used if not name.endswith(HARMLESS_SUFFIXES)]
        beyond = [name for name in unread if _layer_of(name) >= num_layers]
        strange = sorted(set(unread) - set(beyond))
        ours = [name for name in strange if name.startswith(DECODER_PREFIXES)]
        if ours:
            raise DamagedFile(
                f"{self.folder} holds {len(ours)} tensors that its config.json does not account for, such as "
                f"{ours[0]}; the model would compute something else with them: correct config.json, or "
                "remove them"
            )
        for names, why in ((beyond, f"of layers beyond num_hidden_layers = {num_layers}"), (strange, "")):
            if names:
                warnings.warn(
                    f"{self.folder}: {len(names)} tensors {why + ' ' if why else ''}are not used, "
                    f"such as {min(names)}",
                    stacklevel=4,
                )

    def _file_with(self, name: str) -> Any:
        file = self.file_of[name]
        if file not in self.open_files:
            if not (self.folder / file).is_file():
                raise FileNotFoundError(
                    f"{self.folder / INDEX_FILE} lists {file}, which {self.folder} does not hold"
                )
            self.open_files[file] = safe_open(self.folder / file, "pt")
        return self.open_files[file]

    def _scale(self, name: str) -> torch.Tensor | None:
        scale = f"{name}{SCALE_SUFFIX}"
        self.used |= {name, scale}
        return self._file_with(scale).get_tensor(scale) if scale in self.file_of else None

    def _as_weight(self, name: str, tensor: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        kind = str(tensor.dtype).removeprefix("torch.")
        if tensor.dtype in FP8_TYPES:
            if self.fp8 is None:
                raise ValueError(
                    f"{name} is {kind}, and config.json has no quantization_config to read it by"
                )
            if scale is None:
                raise ValueError(f"{name} is {kind}, and its scales {name}{SCALE_SUFFIX} are missing")
            return self.fp8.dequantise(name, tensor, scale)
        if scale is not None:
            raise ValueError(f"{name} is {kind} and has scales, {name}{SCALE_SUFFIX}; only FP8 can have them")
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ValueError(f"{name} is {kind}; a weight must be a floating-point number")
        return tensor

    def _expert(self, fused: str, index: int, kind: str) -> torch.Tensor:
        """One expert's matrix from the tensor that holds all of a layer's; gate lies above up."""
        scale = self._scale(fused)
        matrix = self._file_with(fused).get_slice(fused)[index]
        if scale is not None and scale.ndim > 1:
            scale = scale[index]
        matrix = self._as_weight(fused, matrix, scale)
        rows = len(matrix)
        start, stop = {"gate": (0, rows // 2), "up": (rows // 2, rows), "down": (0, rows)}[kind]
        return matrix[start:stop]


def _file_of_tensors(folder: Path) -> dict[str, str]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if index.is_file():
        with errors_name(index):
            file_of = dict(read_json(index)["weight_map"])
        outside = next((file for file in file_of.values() if not _is_plain_name(file)), None)
        if outside is not None:
            raise DamagedFile(f"{index} lists {outside!r}: it must name files of its own folder")
        if single.is_file() and set(file_of.values()) != {SINGLE_FILE}:
            raise DamagedFile(
                f"{folder} holds two models, {SINGLE_FILE} and the files that {INDEX_FILE} lists; some "
                "programs read the one, some the other: remove the one that is not meant"
            )
        return file_of
    if not single.is_file():
        raise FileNotFoundError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    with errors_name(single), safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)


def _is_plain_name(file: Any) -> bool:
    return isinstance(file, str) and file not in ("", ".", "..") and not set(file) & set("/\\\0")


def _layer_of(name: str) -> int:
    """The layer that a tensor belongs to, -1 if to none."""
    layer = LAYER_TENSOR.match(name)
    return int(layer[1]) if layer else -1
