"""Weights on their way to workers: all of them arrive, or the ones from before stay."""

import threading

import pytest
import torch

from paceline.kernels import word_sums
from paceline.worker import digest as digest_module
from paceline.worker.broadcast import BroadcastReader, BroadcastWeights
from paceline.worker.digest import WeightsDigest, tensor_digest, weights_digest
from paceline.worker.readers import TransferInterrupted, WeightsDamaged
from paceline.worker.weights import SharedWeights, WeightsReader

CPU = torch.device("cpu")


def some_weights(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return [
        ("a", torch.randn(33, 7, generator=generator)),
        ("b", torch.randn(129, generator=generator).to(torch.bfloat16)),
        ("empty", torch.zeros(0, 4)),
        ("c", torch.randint(-9, 9, (5,), generator=generator, dtype=torch.int8)),
        ("view", torch.randn(8, 6, generator=generator).T),
    ]


def same(left, right) -> bool:
    return [n for n, _ in left] == [n for n, _ in right] and all(
        torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in zip(left, right, strict=True)
    )


def test_digest_notices_a_bit_a_swap_a_name_and_a_type():
    weights = some_weights(0)
    digest = weights_digest(weights)
    assert digest == weights_digest(some_weights(0))
    flipped = weights[0][1].clone()
    flipped.view(torch.int32)[3, 2] ^= 1
    swapped = weights[0][1].clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    for change in (
        [("a", flipped), *weights[1:]],
        [("a", swapped), *weights[1:]],
        [("x", weights[0][1]), *weights[1:]],
        [("a", weights[0][1].view(torch.int32)), *weights[1:]],
        weights[1:],
    ):
        assert weights_digest(change) != digest


def test_digest_sums_every_word_of_every_piece(monkeypatch):
    period = word_sums.PERIOD
    monkeypatch.setattr(word_sums, "PIECE", 2 * period)
    count = 5 * period + 3
    words = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(3))
    tensor = torch.cat([words.view(torch.uint8), torch.tensor([5, 7], dtype=torch.uint8)])
    plain = sum(words.tolist()) + 5 * 1 + 7 * 2
    weighted = sum(w * (i % period + 1) * (i // (2 * period) + 1) for i, w in enumerate(words.tolist()))
    assert tensor_digest(tensor) == (plain % 2**64, weighted % 2**64)
    moved = torch.cat([tensor[8 * period * 2 :], tensor[: 8 * period * 2]])
    assert tensor_digest(moved) != tensor_digest(tensor), "two pieces in each other's place"
    assert tensor_digest(tensor[1:].clone()) == tensor_digest(tensor[1:])  # not aligned


def test_digest_has_a_stable_value():
    numbers = torch.arange(240, dtype=torch.int32)
    weights = [
        ("a", numbers[:35].view(5, 7).float()),
        ("b", numbers[:131].to(torch.bfloat16)),
        ("empty", torch.zeros(0, 4)),
        ("c", numbers[:5].to(torch.int8)),
        ("view", numbers[:48].view(8, 6).double().T),
        ("not aligned", numbers[:33].to(torch.bfloat16)[1:]),
    ]
    assert weights_digest(weights) == "e2c0e73320088cf40914bcd2f5a2b51b"
    assert weights_digest([]) == "cae66941d9efbd404e4d88758ea67670"


def test_kept_digest_notices_moved_and_changed_tensors():
    kept = WeightsDigest()
    whole = torch.arange(64.0)
    first = [("a", whole[:16]), ("b", whole[16:48].view(4, 8))]
    seen = {kept.of(first)}
    for weights in (
        [("a", whole[32:48]), first[1]],  # another address
        [first[0], ("b", whole[16:48].view(8, 4))],
        [first[0], ("b", whole[16:48].view(4, 8).view(torch.int32))],
        [first[0], ("b", whole[16:48].view(8, 4).T)],  # another stride
        [("x", first[0][1]), first[1]],
        first[:1],
        [],
    ):
        kept.of(first)
        assert kept.of(weights) == weights_digest(weights)
        seen |= {kept.of(weights)}
    assert len(seen) == 8
    for weights in (first, [*first, ("not contiguous", whole.view(8, 8).T)]):
        for _ in range(2):
            whole += 1  # in place
            assert kept.of(weights) == weights_digest(weights) and kept.of(weights) not in seen


def test_kept_digest_inspects_tensors_that_stay_only_once(monkeypatch):
    looks = []
    monkeypatch.setattr(
        digest_module, "WordSums", lambda pieces: looks.append(1) or word_sums.WordSums(pieces)
    )
    weights = [("a", torch.arange(16.0)), ("odd", torch.arange(5, dtype=torch.int8))]
    kept = WeightsDigest()
    for _ in range(3):
        weights[1][1].add_(1)
        kept.of(weights)
    assert len(looks) == 1


def test_shared_weights_reader_notices_memory_that_changed_on_the_way():
    shared = SharedWeights()
    shared.write(3, some_weights(1))
    (notice,) = shared.notices(["w"])
    assert same(WeightsReader().read(notice), some_weights(1))  # opened by its path, as Ray's actors do
    shared.file.seek(5)
    shared.file.write(b"\xff")
    shared.file.flush()
    with pytest.raises(WeightsDamaged, match="version 3 arrived with digest"):
        WeightsReader(shared.descriptor).read(notice)
    shared.close()


def test_writer_waits_while_weights_are_being_read():
    shared = SharedWeights()
    shared.write(1, some_weights(1))
    shared.begin_reading()
    writer = threading.Thread(target=shared.write, args=(2, some_weights(2)))
    writer.start()
    writer.join(0.2)
    assert writer.is_alive() and shared.version == 1
    shared.end_reading()
    writer.join(120)
    assert shared.version == 2
    shared.close()


def read_all(readers, notices):
    found = [None] * len(readers)

    def read(index):
        try:
            found[index] = readers[index].read(notices[index])
        except TransferInterrupted as problem:
            found[index] = problem

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(readers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    return found


def test_broadcast_reaches_all_in_buckets_and_keeps_its_group():
    source = BroadcastWeights("127.0.0.1", CPU, bucket_bytes=100)  # tensors are cut, and share buckets
    readers = [BroadcastReader(CPU) for _ in range(3)]
    names = []
    for version in (1, 2):
        source.write(version, some_weights(version))
        notices = source.notices(["x", "y", "z"])
        names.append(notices[0]["group"])
        assert all(same(found, some_weights(version)) for found in read_all(readers, notices))
    assert names[0] == names[1], "the same workers, another group"
    notices = source.notices(["x", "y"])
    assert all(same(found, some_weights(2)) for found in read_all(readers[:2], notices))
    assert notices[0]["group"] != names[0]
    source.close()


def test_broadcast_is_interrupted_by_a_missing_worker_and_the_next_one_works():
    source = BroadcastWeights("127.0.0.1", CPU)
    source.write(1, some_weights(1))
    reader = BroadcastReader(CPU)
    notices = source.notices(["x", "gone"])
    threading.Timer(0.3, source.cancel, notices[:1]).start()
    (found,) = read_all([reader], notices[:1])
    assert isinstance(found, TransferInterrupted)
    (again,) = read_all([reader], source.notices(["x"]))
    assert same(again, some_weights(1))
    source.close()
