"""The engine at FP8: exact under speculation and any batch, calibrated, following updates, able to go
back.
"""

import random
from dataclasses import replace

import pytest
import torch

from paceline.drafting.history import HistoryDrafter
from paceline.engine.engine import Engine, EngineSettings
from paceline.kernels.fp8_format import E4M3
from paceline.learning.batch import TrainingSequence, micro_batches
from paceline.learning.logprobs import token_logprobs
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.huggingface import exported_tensors, load_policy
from paceline.precision import rollout as precision_rollout
from paceline.types import FinishReason
from tests.drafting.test_exactness import HalfRightDrafter, OracleDrafter, RandomDrafter, run
from tests.engine.test_engine import bits, grouped_requests
from tests.oracles import small_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {}
    for family in ("qwen2", "qwen3", "qwen3_moe"):
        folders[family] = tmp_path_factory.mktemp(family)
        small_model(family).save_pretrained(folders[family])
    return folders


def make_engine(folder, precision="fp8+kv", **settings) -> Engine:
    return Engine(
        load_policy(folder, torch.float32),
        EngineSettings(**{"max_running": 8, "kv_tokens": 2048, "precision": precision, **settings}),
    )


def complete(engine, requests):
    engine.submit(requests)
    return {c.request.id: c for c in engine.completions()}


@pytest.mark.parametrize(
    "family, precision",
    [
        pytest.param("qwen3", "fp8+kv", marks=pytest.mark.slow),
        pytest.param("qwen2", "fp8", marks=pytest.mark.slow),
        ("qwen3_moe", "fp8+kv"),
        pytest.param("qwen2", "kv", marks=pytest.mark.slow),
    ],
)
def test_fp8_engine_gives_the_same_bits_with_any_drafter(family, precision, folders):
    requests = grouped_requests(prompts=3, samples=2, longest=30)
    _, plain = run(folders[family], requests, precision=precision)
    for drafter, count in (
        (RandomDrafter(), 4),
        (OracleDrafter(plain), 15),
        (HalfRightDrafter(plain), 5),
        (HistoryDrafter(bank_tokens=240), 3),
    ):
        _, done = run(
            folders[family], requests, [drafter], Strategy(drafter.name, count), precision=precision
        )
        assert bits(done) == bits(plain), drafter.name


def test_fp8_engine_bits_do_not_depend_on_batch_chunks_or_preemption(folders):
    requests = grouped_requests(prompts=4, samples=3, longest=40)
    expected = bits(complete(make_engine(folders["qwen3"], max_running=1), requests))
    assert (
        bits(complete(make_engine(folders["qwen3"], max_running=12, prefill_tokens=7), requests)) == expected
    )
    cramped = make_engine(folders["qwen3"], kv_tokens=112)
    assert bits(complete(cramped, requests)) == expected and cramped.preemptions > 0
    paced = make_engine(folders["qwen3"], kv_tokens=256)
    paced.pacer = FixedPacer(Strategy("history", 4), 1000)
    paced = Engine(paced.policy, paced.settings, drafters=[HistoryDrafter()], pacer=paced.pacer)
    assert bits(complete(paced, random.Random(1).sample(requests, len(requests)))) == expected, (
        "scales do not depend on the order of requests"
    )


def logprob_differences(engine, done) -> torch.Tensor:
    """|the learner's logprob - the engine's|, token by token."""
    found = []
    for c in done.values():
        temperature = c.request.sampling.temperature or 1.0
        sequence = TrainingSequence(
            c.request.prompt + c.tokens,
            len(c.request.prompt),
            (True,) * len(c.tokens),
            c.logprobs,
            1.0,
            temperature,
        )
        (batch,) = micro_batches([sequence], 4096, engine.policy.device)
        with torch.no_grad():
            found.append((token_logprobs(engine.policy, batch)[0] - batch.rollout_logprobs_R).abs())
    return torch.cat(found)


def test_fp8_engine_samples_from_a_nearby_policy_and_reports_its_precision(folders):
    """Logprobs are those of the FP8 policy: near the learner's, not equal to them; base ones are equal."""
    differences = {}
    for precision in ("base", "fp8", "fp8+kv", "kv"):
        engine = make_engine(folders["qwen3"], precision)
        assert engine.precision == precision
        done = complete(engine, grouped_requests(prompts=4, samples=2, longest=30))
        assert (engine.take_stats().precision is None) == (precision == "base")
        differences[precision] = float(logprob_differences(engine, done).mean())
    assert differences["base"] < 1e-4
    assert 1e-3 < differences["fp8"] < 0.3 and 1e-3 < differences["fp8+kv"] < 0.3, differences
    assert 1e-4 < differences["kv"] < differences["fp8+kv"], differences


def test_fp8_kv_cache_takes_a_quarter_of_a_float32_cache(folders):
    wide, narrow = make_engine(folders["qwen3"], "fp8"), make_engine(folders["qwen3"], "fp8+kv")
    assert wide.cache.num_bytes == 4 * narrow.cache.num_bytes and narrow.cache.layer(0)[0].dtype == E4M3
    alone = make_engine(folders["qwen3"], "kv")
    assert alone.cache.num_bytes == narrow.cache.num_bytes and alone.rollout_precision.weights is None


def observe_training_pass(engine, tokens=range(3, 60)):
    from paceline.policy.attention import PackedAttention

    attention = PackedAttention([len(tokens)], engine.policy.device)
    attention.observe = engine.attention_observer
    with torch.no_grad():
        engine.policy(torch.tensor(list(tokens)), attention.positions_T, attention)


def test_weight_update_requantises_and_recalibrates(folders):
    """The same numbers as an engine that starts with the new weights and the same scales; running requests go
    on.
    """
    requests = grouped_requests(prompts=3, samples=2, longest=30)
    engine = make_engine(folders["qwen3"])
    complete(engine, requests)
    first = engine.rollout_precision.kv.scales_L2H.clone()
    with torch.no_grad():
        for parameter in engine.policy.parameters():
            parameter.mul_(1.1)
    observe_training_pass(engine)
    engine.update_weights(1)
    assert not torch.equal(engine.rollout_precision.kv.scales_L2H, first)
    fresh = Engine(engine.policy, engine.settings)
    fresh.load_calibration_state(engine.calibration_state())
    fresh.update_weights(1)
    assert torch.equal(fresh.rollout_precision.kv.scales_L2H, engine.rollout_precision.kv.scales_L2H), (
        "a checkpoint carries the scales"
    )
    assert bits(complete(engine, requests)) == bits(complete(fresh, requests))


@pytest.mark.parametrize("family", [pytest.param("qwen2", marks=pytest.mark.slow), "qwen3_moe"])
@pytest.mark.parametrize("precision", ["fp8", "base"])
def test_weight_update_reaches_every_parameter(folders, family, precision):
    """Projections are copied where they are quantised, everything else is copied before."""
    requests = grouped_requests(prompts=3, samples=2, longest=30)
    engine = make_engine(folders[family], precision)
    newer = load_policy(folders[family], torch.float32)
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter.mul_(1.1)
    engine.update_weights(1, exported_tensors(newer))
    for (name, parameter), other in zip(engine.policy.named_parameters(), newer.parameters(), strict=True):
        assert torch.equal(parameter, other), name
    fresh = Engine(newer, engine.settings, version=1)
    assert bits(complete(engine, requests)) == bits(complete(fresh, requests))


def test_layer_that_fails_validation_keeps_the_policys_type(folders, monkeypatch):
    requests = grouped_requests(prompts=3, samples=2, longest=30)
    engine = make_engine(folders["qwen3"])
    engine.submit(requests)
    original = precision_rollout.KVScales.calibrate

    def spoiled(self):
        windows = list(self._windows)
        original(self)
        self._windows = windows
        self.scales_L2H[1] /= 50
        return self.validate()

    monkeypatch.setattr(precision_rollout.KVScales, "calibrate", spoiled)
    with pytest.warns(RuntimeWarning, match="more than 20% in layer 1 "):
        done = {c.request.id: c for c in engine.completions()}
    assert len(done) == len(requests) and engine.pool.used == 0
    assert [engine.cache.layer(i)[0].dtype for i in range(3)] == [E4M3, torch.float32, E4M3]
    assert engine.cache.scales(1) == (None, None)
    told = engine.take_stats().precision
    assert told.kv_base_layers == 1 and told.kv_error > 0.2
    other = make_engine(folders["qwen3"])
    monkeypatch.undo()
    other.load_calibration_state(engine.calibration_state())
    assert bits(complete(other, requests)) == bits(done), "a resumed run keeps the layer as it was"
    assert other.take_stats().precision == replace(
        told, quantise_seconds=other.take_stats().precision.quantise_seconds
    ), "and reports what it did"


def test_fall_back_in_a_rollout_loses_no_request(folders):
    """From there on it is the bf16 policy: what had not started comes out as an engine without FP8 says."""
    requests = grouped_requests(prompts=4, samples=3, longest=40)
    plain = complete(make_engine(folders["qwen3"], "bf16"), requests)
    engine = make_engine(folders["qwen3"], max_running=2)
    engine.submit(requests)
    done, started = {}, set()
    for completion in engine.completions():
        done[completion.request.id] = completion
        if not started:
            started = (
                {s.request.id for s in engine.running.values()}
                | set(done)
                | {s.request.id for s in engine.scheduler.sequences if s.response}
            )
            engine.fall_back_to_base_precision()
            assert engine.precision == "base" and engine.attention_observer is None
    assert len(done) == len(requests) and engine.pool.used == 0
    later = set(done) - started
    assert len(later) >= 6 and all(done[name].tokens == plain[name].tokens for name in later)
    assert all(
        torch.allclose(torch.tensor(done[n].logprobs), torch.tensor(plain[n].logprobs), atol=1e-5)
        for n in later
    )


@pytest.mark.slow
def test_fall_back_keeps_room_for_a_request_that_fitted(folders):
    """Between steps nothing is queued that could say how long requests are; in half the tokens the longest
    would be refused.
    """
    requests = [
        replace(request, sampling=replace(request.sampling, max_tokens=50))
        for request in grouped_requests(prompts=1, samples=2, longest=40)
    ]
    longest = max(len(request.prompt) for request in requests) + 50
    engine = make_engine(folders["qwen3"], kv_tokens=longest, request_tokens=longest)
    assert FinishReason.REFUSED not in {c.finish_reason for c in complete(engine, requests).values()}
    engine.fall_back_to_base_precision()
    assert bits(complete(engine, requests)) == bits(complete(make_engine(folders["qwen3"], "bf16"), requests))


def test_uncalibrated_kv_cache_has_nan_scales(folders):
    engine = make_engine(folders["qwen3"])
    assert engine.rollout_precision.wants_prompts and engine.rollout_precision.kv.scales_L2H.isnan().all()
