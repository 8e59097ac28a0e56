"""Weights for ranks that are processes of their own: what is written is what each of them reads."""

import pickle

import torch
from safetensors.torch import save_file

from paceline.vllm_backend.weight_file import WeightFile


def test_weight_file_is_read_by_every_rank(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).to(torch.bfloat16)}
    save_file(tensors, tmp_path / "weights.safetensors")
    sent = pickle.loads(pickle.dumps(WeightFile(str(tmp_path / "weights.safetensors"))))
    read = dict(sent.read())
    assert set(read) == set(tensors) and all(torch.equal(read[name], tensors[name]) for name in tensors)
