"""The engine against the naive sampler, and against itself: nothing but the request decides a completion."""

import random
from dataclasses import replace

import pytest
import torch

from paceline.drafting.history import HistoryDrafter
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.expected_lengths import ExpectedLengths
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.huggingface import exported_tensors, load_policy
from paceline.types import Completion, FinishReason, Request, SamplingParams, Segment
from tests.engine.test_reference import make_requests, naive_sample
from tests.oracles import EVERY_FAMILY, FAMILIES, double_precision, small_model


def run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    engine.submit(requests)
    done = list(engine.completions())
    assert len({c.request.id for c in done}) == len(done) == len(requests)
    assert engine.pool.used == 0 and len(engine.scheduler.free_slots) == engine.settings.max_running, (
        "everything is given back"
    )
    assert not engine.scheduler.shared and not engine.scheduler.waiting_prompts
    return {c.request.id: c for c in done}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {}
    for family in FAMILIES:
        folders[family] = tmp_path_factory.mktemp(family)
        small_model(family).save_pretrained(folders[family])
    return folders


def make_engine(folder, dtype=torch.float32, **settings) -> Engine:
    return Engine(
        load_policy(folder, dtype), EngineSettings(**{"max_running": 8, "kv_tokens": 2048, **settings})
    )


def grouped_requests(prompts: int, samples: int, longest: int, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for p in range(prompts):
        prompt = tuple(rng.randrange(3, 97) for _ in range(rng.choice((1, 2, 15, 16, 17, 33, 40))))
        for s in range(samples):
            sampling = SamplingParams(
                temperature=rng.choice((1.0, 0.7, 0.0)),
                max_tokens=rng.randint(1, longest),
                stop_token_ids=(11,),
            )
            requests.append(Request(f"{p}/{s}", prompt, rng.getrandbits(62), sampling, group=str(p)))
    return requests


def bits(completions: dict[str, Completion]) -> dict[str, tuple]:
    return {name: (c.tokens, c.logprobs, c.finish_reason) for name, c in completions.items()}


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_engine_equals_naive_transformers_sampling_in_float64(family, folders):
    with double_precision():
        oracle = small_model(family)
        engine = make_engine(folders[family], torch.float64, max_running=5)
        requests = make_requests(9)
        done = run(engine, requests)
        for request in requests:
            tokens, logprobs = naive_sample(oracle, request, limit=256)
            assert done[request.id].tokens == tuple(tokens)
            assert done[request.id].logprobs == pytest.approx(logprobs, abs=1e-9)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_engine_bits_depend_on_nothing_but_the_request(family, folders):
    """Batch size, siblings, a tiny pool with preemption, chunked prefill, arrival order: the same float32
    bits.
    """
    requests = grouped_requests(prompts=4, samples=3, longest=60)
    alone = {}
    for request in requests:
        alone |= run(make_engine(folders[family], max_running=1), [request])
    shuffled = random.Random(1).sample(requests, len(requests))
    cramped = make_engine(folders[family], max_running=8, kv_tokens=128)
    assert bits(run(make_engine(folders[family]), requests)) == bits(alone)
    assert bits(run(make_engine(folders[family], max_running=12), shuffled)) == bits(alone)
    assert bits(run(make_engine(folders[family], prefill_tokens=7), requests)) == bits(alone)
    assert bits(run(cramped, requests)) == bits(alone)
    assert cramped.preemptions > 0, "this pool is too small not to preempt"


def test_engine_prefills_the_prompt_of_a_group_once(folders):
    engine = make_engine(folders["llama"], max_running=4)
    prompt = tuple(range(3, 43))
    requests = [Request(f"{i}", prompt, i, SamplingParams(max_tokens=9)) for i in range(10)]
    run(engine, requests)
    assert engine.take_stats().prefill_tokens == 39


def test_refusals_name_the_reason_and_spare_other_requests(folders):
    engine = make_engine(folders["llama"], kv_tokens=128)
    long = SamplingParams(max_tokens=500)
    requests = [
        Request("too long for the model", (5,) * 256, 1, long),
        Request("too long for the pool", (5,), 1, long),
        Request("empty", (), 1, long),
        Request("too many stops", (5,), 1, SamplingParams(max_tokens=3, stop_token_ids=tuple(range(50)))),
        Request("fine", (5,), 1, SamplingParams(max_tokens=3, ignore_eos=True)),
    ]
    done = run(engine, requests)
    assert done["fine"].finish_reason is FinishReason.LENGTH and len(done["fine"].tokens) == 3
    assert (
        "takes 1 to 255" in done["too long for the model"].error and "takes 1 to 255" in done["empty"].error
    )
    assert "256 KV tokens; the pool holds 128" in done["too long for the pool"].error
    assert "50 stop tokens" in done["too many stops"].error


@pytest.mark.parametrize(
    "bad, error",
    [
        ({"prompt": (3, 97)}, "holds token 97; the policy's are 0 to 96"),
        ({"prompt": (-1, 3)}, "holds token -1"),
        ({"max_tokens": -5}, "max_tokens -5; it must be 0 or more"),
        ({"top_logprobs": 98}, "top_logprobs 98; it must be 0 to 97"),
        ({"top_logprobs": -1}, "top_logprobs -1"),
        ({"seed": 1 << 63}, f"seed {1 << 63} does not fit into 64 bits"),
        ({"top_k": 1 << 63}, f"top_k {1 << 63} does not fit"),
        ({"stop_token_ids": (1 << 63,)}, f"stop token {1 << 63} does not fit"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "-".join(value),
)
def test_bad_request_does_not_stop_the_others(folders, bad, error):
    sound = Request("sound", (3, 4, 5), 7, SamplingParams(max_tokens=6, ignore_eos=True))
    (wanted,) = run(make_engine(folders["llama"]), [sound]).values()
    own = {key: value for key, value in bad.items() if key in ("prompt", "seed")}
    sampling = replace(sound.sampling, **{key: value for key, value in bad.items() if key not in own})
    done = run(make_engine(folders["llama"]), [replace(sound, id="bad", sampling=sampling, **own), sound])
    assert done["bad"].finish_reason is FinishReason.REFUSED and error in done["bad"].error
    assert done["sound"] == wanted


def test_engine_runs_requests_at_the_allowed_extremes(folders):
    extremes = SamplingParams(max_tokens=2, top_logprobs=97, top_k=(1 << 63) - 1, ignore_eos=True)
    requests = [
        Request("extreme", (0, 96), -(1 << 63), extremes),
        Request("nothing", (96,), (1 << 63) - 1, SamplingParams(max_tokens=0)),
    ]
    done = run(make_engine(folders["llama"]), requests)
    assert (
        len(done["extreme"].tokens) == 2
        and len(done["extreme"].top_logprobs[0]) == 97
        and done["nothing"].tokens == ()
    )


def test_abort_ends_running_waiting_and_shared_requests(folders):
    engine = make_engine(folders["llama"], max_running=4)
    endless = SamplingParams(max_tokens=150, ignore_eos=True)
    requests = [Request(str(i), (5, 6, 7) if i % 2 else (8 + i,), i, endless) for i in range(10)]
    engine.submit([*requests, Request("short", (9,), 0, SamplingParams(max_tokens=2, ignore_eos=True))])
    engine.abort(["8", "9"])
    seen = []
    for completion in engine.completions():
        seen.append(completion)
        if completion.request.id == "short":
            engine.abort([str(i) for i in range(10)])
        elif len(seen) == 1:
            engine.abort(["0", "1", "3"])
    assert len(seen) == 11 and engine.pool.used == 0
    assert {c.request.id for c in seen if c.finish_reason is FinishReason.ABORTED} >= {"8", "9"}


def test_weight_update_in_a_rollout_makes_segments_and_reuses_no_cache(folders):
    engine = make_engine(folders["qwen3"])
    request = Request("a", tuple(range(3, 40)), 9, SamplingParams(max_tokens=30, ignore_eos=True))
    engine.submit([request, Request("b", (8,), 1, SamplingParams(max_tokens=4, ignore_eos=True))])
    for completion in engine.completions():
        assert completion.request.id == "b"
        engine.pause()
    changed = {name: tensor * 1.05 for name, tensor in exported_tensors(engine.policy)}
    engine.update_weights(7, changed.items())
    engine.resume()
    (completion,) = engine.completions()
    first, second = completion.segments
    assert (first.weight_version, second.weight_version, second.stop) == (0, 7, 30)
    continued = Request(
        "c",
        request.prompt + completion.tokens[: first.stop],
        9,
        SamplingParams(max_tokens=30 - first.stop, ignore_eos=True),
    )
    again = run(engine, [continued])["c"]
    assert (
        again.tokens == completion.tokens[first.stop :]
        and again.logprobs == completion.logprobs[first.stop :]
    )
    assert completion.segments == (Segment(0, first.stop, 0), Segment(first.stop, 30, 7))


def test_sleep_and_wake_keep_requests(folders):
    requests = grouped_requests(4, 2, 40)
    expected = bits(run(make_engine(folders["llama"]), requests))
    engine = make_engine(folders["llama"])
    engine.submit(requests)
    done = []
    for completion in engine.completions():
        done.append(completion)
        if len(done) == 3:
            engine.pause()
    engine.sleep()
    assert engine.cache.storages[torch.float32].tensor is None  # on a CPU; on a GPU the address stays
    engine.wake()
    engine.resume()
    done += engine.completions()
    assert bits({c.request.id: c for c in done}) == expected


def test_close_releases_the_cache(folders):
    engine = make_engine(folders["llama"])
    engine.submit(grouped_requests(2, 2, 8))
    engine.close()
    assert engine.cache.storages and all(s.tensor is None for s in engine.cache.storages.values())
    assert not engine.scheduler.waiting
    engine.close()  # once more is no mistake


def test_truncated_sampling_equals_the_reference(folders):
    from paceline.engine.reference import ReferenceBackend

    rng = random.Random(5)
    requests = []
    for i in range(12):
        settings = rng.choice(
            ({"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8, "min_p": 0.05}, {})
        )
        requests.append(
            Request(str(i), (5 + i, 6), i, SamplingParams(temperature=1.3, max_tokens=25, **settings))
        )
    reference = ReferenceBackend(load_policy(folders["llama"], torch.float64))
    reference.submit(requests)
    expected = {c.request.id: c for c in reference.completions()}
    done = run(make_engine(folders["llama"], torch.float64), requests)
    for name, completion in done.items():
        assert completion.tokens == expected[name].tokens
        assert completion.logprobs == pytest.approx(expected[name].logprobs, abs=1e-9)


@pytest.mark.slow
def test_engine_soak_ends_every_request_and_frees_all_blocks(folders):
    """Many requests of random shapes through a small pool: every one ends exactly once, every block comes
    back.
    """
    rng = random.Random(0)
    engine = make_engine(folders["llama"], max_running=12, kv_tokens=512, prefill_tokens=64)
    requests = grouped_requests(prompts=50, samples=3, longest=50, seed=2)
    waves = [requests[i : i + 50] for i in range(0, len(requests), 50)]
    engine.submit(waves.pop())
    seen, aborted = [], set()
    for completion in engine.completions():
        seen.append(completion.request.id)
        if waves and rng.random() < 0.1:
            engine.submit(waves.pop())
        if rng.random() < 0.05:
            victim = rng.choice(requests).id
            aborted.add(victim)
            engine.abort([victim])
    while waves:
        engine.submit(waves.pop())
        seen += [c.request.id for c in engine.completions()]
    assert sorted(seen) == sorted(r.id for r in requests)
    assert engine.pool.used == 0 and not engine.running and not engine.scheduler.shared


def test_stop_strings_and_top_logprobs_equal_the_reference(folders):
    from paceline.engine.reference import ReferenceBackend
    from paceline.policy.tokenizer import character_tokenizer

    alphabet = "".join(chr(0x4E00 + i) for i in range(96))
    tokenizer = character_tokenizer(alphabet)
    rng = random.Random(7)
    requests = []
    for i in range(16):
        stop = ("".join(rng.choice(alphabet[:6]) for _ in range(1 + i % 2)), alphabet[40]) if i % 4 else ()
        sampling = SamplingParams(temperature=0.8, max_tokens=40, stop=stop, top_logprobs=(0, 3, 5)[i % 3])
        requests.append(Request(str(i), (5 + i, 6), i, sampling))
    reference = ReferenceBackend(load_policy(folders["llama"], torch.float64), tokenizer=tokenizer)
    reference.submit(requests)
    expected = {c.request.id: c for c in reference.completions()}
    engine = Engine(
        load_policy(folders["llama"], torch.float64), EngineSettings(max_running=5, kv_tokens=512), tokenizer
    )
    done = run(engine, requests)
    assert any(c.finish_reason is FinishReason.STOP and c.tokens[-1] != 2 for c in done.values()), (
        "a stop string was met"
    )
    for name, completion in done.items():
        assert (completion.tokens, completion.finish_reason) == (
            expected[name].tokens,
            expected[name].finish_reason,
        )
        assert completion.logprobs == pytest.approx(expected[name].logprobs, abs=1e-9)
        assert len(completion.top_logprobs) == (
            len(completion.tokens) if completion.request.sampling.top_logprobs else 0
        )
        for ours, theirs in zip(completion.top_logprobs, expected[name].top_logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-9)


def test_continued_sequence_recomputes_only_new_tokens(folders):
    engine = make_engine(folders["llama"])
    prompt = tuple(range(3, 40))
    engine.submit([Request("turn 1", prompt, 5, SamplingParams(max_tokens=20, ignore_eos=True), hold=True)])
    (first,) = engine.completions()
    assert engine.pool.used > 0
    engine.take_stats()
    longer = prompt + first.tokens + (50, 51, 52)
    second = Request("turn 2", longer, 5, SamplingParams(max_tokens=10, ignore_eos=True), continues="turn 1")
    again = run(engine, [second])["turn 2"]
    assert engine.take_stats().prefill_tokens == 3, "the last sampled token and the observation but its last"
    fresh = run(
        make_engine(folders["llama"]),
        [Request("x", longer, 5, SamplingParams(max_tokens=10, ignore_eos=True))],
    )["x"]
    assert (again.tokens, again.logprobs) == (fresh.tokens, fresh.logprobs)

    engine.submit([Request("turn 1", prompt, 5, SamplingParams(max_tokens=20, ignore_eos=True), hold=True)])
    list(engine.completions())
    engine.update_weights(1)
    assert engine.pool.used == 0, "a held cache does not outlive its weights"


def test_held_sequences_are_dropped_when_blocks_run_out(folders):
    engine = make_engine(folders["llama"], kv_tokens=128)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    engine.submit([Request(str(i), (5 + i,), i, sampling, hold=True) for i in range(3)])
    assert len(list(engine.completions())) == 3
    engine.submit([Request("big", (9,), 1, SamplingParams(max_tokens=120, ignore_eos=True))])
    (big,) = engine.completions()
    assert len(big.tokens) == 120 and not engine.scheduler.held


@pytest.mark.slow
def test_waiting_request_releases_a_held_cache_that_earlier_ones_need(folders):
    """The pool holds either of them; a request that waits with a held cache must not lock out the other,
    which was preempted and is first in the queue.
    """
    engine = make_engine(folders["llama"], kv_tokens=160)
    prompt = tuple(range(3, 43))
    engine.submit([Request("1", prompt, 5, SamplingParams(max_tokens=8, ignore_eos=True), hold=True)])
    (first,) = engine.completions()
    longer = prompt + first.tokens + tuple(range(3, 93))
    big = Request("big", (5, 6, 7), 1, SamplingParams(max_tokens=150, ignore_eos=True))
    engine.submit(
        [big, Request("2", longer, 2, SamplingParams(max_tokens=10, ignore_eos=True), continues="1")]
    )
    admit, idle = engine.scheduler.admit, 0

    def watched(*arguments):
        nonlocal idle
        aborted = admit(*arguments)
        idle = 0 if engine.running or engine.scheduler.prefills else idle + 1
        assert idle < 10, "no request runs and none is admitted"
        return aborted

    engine.scheduler.admit = watched
    assert sorted((c.request.id, len(c.tokens)) for c in engine.completions()) == [("2", 10), ("big", 150)]
    assert engine.pool.used == 0


def test_hold_of_two_requests_with_one_id_keeps_one_cache(folders):
    engine = make_engine(folders["llama"])
    for _ in range(2):
        engine.submit(
            [Request("1", (4, 5, 6) * 5, 5, SamplingParams(max_tokens=8, ignore_eos=True), hold=True)]
        )
        list(engine.completions())
    engine.abort(["1"])
    assert engine.pool.used == 0


@pytest.mark.slow
def test_admission_with_speculation_in_a_small_pool_avoids_instant_preemption(folders):
    """Deep proposals reserve blocks ahead; a request admitted into those is prefilled, preempted and
    prefilled again.
    """
    drafters, pacer = [HistoryDrafter()], FixedPacer(Strategy("history", 3))
    engine = Engine(
        load_policy(folders["llama"], torch.float32),
        EngineSettings(max_running=8, kv_tokens=320),
        drafters=drafters,
        pacer=pacer,
    )
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    run(engine, [Request(str(i), tuple(range(3 + i, 43 + i)), i, sampling) for i in range(8)])
    assert engine.preemptions <= 8
    assert engine.take_stats().prefill_tokens < 2 * 8 * 39


def test_longest_admission_starts_the_longest_expected_first(folders):
    engine = make_engine(folders["llama"], max_running=1, admission="longest")
    requests = [
        Request(str(n), (5,), n, SamplingParams(max_tokens=n, ignore_eos=True), expected_tokens=n)
        for n in (3, 9, 6)
    ]
    engine.submit(requests)
    assert [c.request.id for c in engine.completions()] == ["9", "6", "3"]


def test_longest_admission_learns_from_siblings_and_earlier_epochs(folders):
    """The first epoch's requests come in order, but once a sibling has been long the other goes before."""
    engine = make_engine(folders["llama"], max_running=1, admission="longest")

    def epoch(number: int) -> list[str]:
        engine.submit(
            [
                Request(f"{n}{sample}", (5, n), number, SamplingParams(max_tokens=n, ignore_eos=True))
                for sample in "ab"
                for n in (3, 9, 6)
            ]
        )
        return [c.request.id for c in engine.completions()]

    # 9b passes those that are expected to be like the mean; 3b, which is known to be short, is the last.
    assert epoch(0) == ["3a", "9a", "9b", "6a", "6b", "3b"]
    assert epoch(1) == ["9a", "9b", "6a", "6b", "3a", "3b"]


def test_expected_lengths_drop_old_prompts_and_follow_changes():
    lengths = ExpectedLengths(max_prompts=2)
    requests = [Request(str(n), (n,), 0, SamplingParams()) for n in range(4)]
    assert lengths.of(requests[0]) == 0
    for request, tokens in zip(requests[:3], (10, 20, 60), strict=True):
        lengths.note(request, tokens)
    assert [lengths.of(request) for request in requests] == [30, 20, 60, 30], "the unknown are like the mean"
    for _ in range(100):
        lengths.note(requests[1], 100)
    assert 99 < lengths.of(requests[1]) <= 100
    resumed = ExpectedLengths(max_prompts=2)
    resumed.load_state(lengths.state())
    for kept in (lengths, resumed):  # it forgets what the other would
        kept.note(requests[3], 5)
    assert [resumed.of(r) for r in requests] == [lengths.of(r) for r in requests]
    resumed.load_state(ExpectedLengths().state())
    assert resumed.of(requests[1]) == 0


def test_broken_policy_does_not_poison_the_cache(folders):
    """Weights that turn to NaN spoil the completions made with them and nothing after."""
    requests = grouped_requests(4, 2, 30)
    expected = bits(run(make_engine(folders["llama"], kv_tokens=512), requests))
    engine = make_engine(folders["llama"], kv_tokens=512)
    good = {name: tensor.clone() for name, tensor in exported_tensors(engine.policy)}
    engine.update_weights(1, {name: tensor * float("nan") for name, tensor in good.items()}.items())
    spoiled = run(engine, requests)
    assert all(lp != lp for completion in spoiled.values() for lp in completion.logprobs), (
        "every logprob is NaN"
    )
    engine.update_weights(2, good.items())
    assert bits(run(engine, requests)) == expected


def test_continued_sequence_recomputes_its_cache_after_preemption(folders):
    """Its inherited cache goes with its blocks; so does one that a waiting request had taken over when the
    weights changed.
    """
    prompt, sampling = tuple(range(3, 30)), SamplingParams(max_tokens=20, ignore_eos=True)
    fresh = make_engine(folders["llama"])
    first = run(fresh, [Request("1", prompt, 5, sampling)])["1"]
    second = Request(
        "2",
        prompt + first.tokens + (50, 51),
        5,
        SamplingParams(max_tokens=60, ignore_eos=True),
        continues="1",
    )
    others = [
        Request(f"other{i}", (60 + i,), i, SamplingParams(max_tokens=90, ignore_eos=True)) for i in range(3)
    ]
    expected = bits(run(fresh, [second, *others]))
    engine = make_engine(folders["llama"], kv_tokens=256)
    engine.submit([Request("1", prompt, 5, sampling, hold=True)])
    list(engine.completions())
    engine.submit([*others, second])
    done = {c.request.id: c for c in engine.completions()}
    assert bits(done) == expected and engine.preemptions > 0 and engine.pool.used == 0

    engine.submit([Request("1", prompt, 5, sampling, hold=True)])
    list(engine.completions())
    engine.submit([second])
    engine.scheduler._take_held(engine.scheduler.waiting[0])
    engine.update_weights(1)
    assert engine.pool.used == 0
    assert bits({c.request.id: c for c in engine.completions()})["2"] == expected["2"]
