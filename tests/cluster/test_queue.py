"""The order in which replicas take requests; it must lose and repeat none."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.queue import RequestQueue
from paceline.types import Completion, FinishReason, Request, SamplingParams


def request(name: str, prompt=(1,), **more) -> Request:
    return Request(name, tuple(prompt), 0, SamplingParams(), **more)


def finished(name: str, tokens: int, prompt=(1,), **more) -> Completion:
    whole = request(name, prompt, **more)
    return Completion(whole, (0,) * tokens, (0.0,) * tokens, FinishReason.STOP, ())


def names(requests) -> list[str]:
    return [r.id for r in requests]


def test_queue_is_first_come_first_served_while_lengths_are_unknown():
    queue = RequestQueue()
    queue.add([request(f"r{i}", (i,)) for i in range(5)])
    assert names(queue.take(0, 3)) == ["r0", "r1", "r2"] and len(queue) == 2


def test_queue_puts_long_responses_first_and_keeps_siblings_together():
    queue = RequestQueue()
    queue.note(finished("old", 100, (2,)), 0)
    queue.note(finished("older", 10, (1,)), 0)
    queue.add([request("a", (1,)), request("b", (2,)), request("c", (1,)), request("d", (2,))])
    assert names(queue.take(0, 4)) == ["b", "d", "a", "c"]
    queue.add([request("short", expected_tokens=1), request("long", expected_tokens=999)])
    assert names(queue.take(0, 1)) == ["long"]


def test_continuation_waits_for_the_replica_with_its_cache_until_that_is_gone():
    queue = RequestQueue()
    queue.note(finished("turn1", 5, hold=True), 1)
    queue.add([request("turn2", (1, 2), continues="turn1")])
    assert queue.unbound == 0 and queue.waits_for(1) and not queue.waits_for(0)
    assert queue.take(0, 5) == []
    queue.forget(1)
    assert names(queue.take(0, 5)) == ["turn2"]


@given(st.lists(st.tuples(st.sampled_from("atrf"), st.integers(0, 2), st.integers(0, 9)), max_size=60))
def test_queue_loses_and_repeats_no_request(commands):
    queue = RequestQueue()
    added: list[str] = []
    out: list[str] = []
    for command, replica, number in commands:
        if command == "a":
            name = f"r{len(added)}"
            held = f"held{number}"
            queue.note(finished(held, number, hold=True), replica)
            queue.add([request(name, (number,), continues=held if number % 2 else "")])
            added.append(name)
        elif command == "t":
            out += names(queue.take(replica, number))
        elif command == "r":
            out += names(queue.remove({f"r{number}"}))
        else:
            queue.forget(replica)
        assert len(queue) == len(added) - len(out)
    for replica in range(3):
        out += names(queue.take(replica, 1000))
    assert sorted(out) == sorted(added)
