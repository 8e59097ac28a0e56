"""CUDA IPC between two processes on one GPU: the reader sees the writer's memory, whatever changes in it."""

import json
import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

pytestmark = pytest.mark.gpu


def read_on_demand(connection: Connection) -> None:
    """The other process: answers every notice with copies of the weights, or with what went wrong."""
    from paceline.worker.cuda_ipc import IpcReader

    reader = IpcReader()
    while (text := connection.recv()) is not None:
        try:
            connection.send([(name, tensor.cpu()) for name, tensor in reader.read(json.loads(text))])
        except RuntimeError as problem:
            connection.send(str(problem))


@pytest.fixture
def other_process():
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=read_on_demand, args=(there,))
    process.start()
    yield here
    here.send(None)
    process.join(60)
    assert process.exitcode == 0


def test_ipc_reader_has_what_the_writer_wrote(other_process):
    from paceline.worker.cuda_ipc import IpcWeights

    def ask(notice: dict):
        other_process.send(json.dumps(notice))
        assert other_process.poll(60), "the other process does not answer"
        return other_process.recv()

    large = torch.randn(3000, 1000, device="cuda", dtype=torch.bfloat16)
    weights = {"large": large, "view": large[7:11].T, "small": torch.arange(5.0, device="cuda")}
    writer = IpcWeights()
    for version in range(3):
        # In place, and from elsewhere, as a merge of adapters comes.
        large.normal_()
        given = weights | {"small": torch.rand(5, device="cuda")}
        writer.write(version, given.items())
        (notice,) = writer.notices(["replica"])
        assert notice["version"] == version
        found = dict(ask(notice))
        assert found.keys() == given.keys()
        for name, tensor in given.items():
            assert torch.equal(found[name], tensor.cpu()), (version, name)
    large[2, 3] += 1  # behind the writer's back
    torch.cuda.synchronize()
    assert "digest" in ask(notice)
    writer.close()
