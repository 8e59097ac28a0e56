"""The reference generator against the most naive sampler there is: transformers, one request, one token at a
time.
"""

import pytest
import torch
import transformers

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.reference import ReferenceBackend, truncate
from paceline.kernels.noise import gumbel
from paceline.policy.config import from_huggingface
from paceline.policy.huggingface import exported_tensors, load_policy
from paceline.types import FinishReason, Request, SamplingParams, Segment
from tests.oracles import EVERY_FAMILY, double_precision, small_model

EOS = 2


def naive_sample(
    oracle: transformers.PreTrainedModel, request: Request, limit: int
) -> tuple[list[int], list[float]]:
    tokens, logprobs, sampling = [], [], request.sampling
    while True:
        sequence = torch.tensor([[*request.prompt, *tokens]])
        logits = oracle(sequence).logits[0, -1]
        scaled = logits / (sampling.temperature or 1.0)
        noise = gumbel(torch.tensor(request.seed), torch.tensor(sequence.shape[1]), len(logits))
        token = int((scaled + noise if sampling.temperature else scaled).argmax())
        tokens.append(token)
        logprobs.append(scaled.log_softmax(-1)[token].item())
        if (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            return tokens, logprobs
        if len(tokens) == sampling.max_tokens or sequence.shape[1] + 1 >= limit:
            return tokens, logprobs


def make_requests(count: int) -> list[Request]:
    g = torch.Generator().manual_seed(3)
    requests = []
    for i in range(count):
        prompt = tuple(torch.randint(3, 97, (1 + 5 * (i % 4),), generator=g).tolist())
        sampling = SamplingParams(
            temperature=(1.0, 0.6, 0.0)[i % 3],
            max_tokens=5 + 7 * (i % 5),
            stop_token_ids=(11, 12),
            ignore_eos=i % 2 == 0,
        )
        requests.append(Request(str(i), prompt, 1000 + i, sampling))
    return requests


@pytest.mark.slow
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_reference_equals_naive_transformers_sampling(family, tmp_path):
    with double_precision():
        oracle = small_model(family)
        oracle.save_pretrained(tmp_path)
        backend = ReferenceBackend(load_policy(tmp_path, torch.float64), max_running=5)
        requests = make_requests(12)
        backend.submit(requests)
        done = {c.request.id: c for c in backend.completions()}
        assert len(done) == 12
        for request in requests:
            tokens, logprobs = naive_sample(oracle, request, limit=256)
            assert done[request.id].tokens == tuple(tokens)
            assert done[request.id].logprobs == pytest.approx(logprobs, abs=1e-9)


@pytest.fixture
def backend(tmp_path):
    small_model("llama").save_pretrained(tmp_path)
    return ReferenceBackend(load_policy(tmp_path, torch.float64), max_running=4)


def test_requests_end_exactly_once_with_the_right_finish_reason(backend):
    long = SamplingParams(max_tokens=10_000, ignore_eos=True, temperature=1.0)
    requests = [
        Request("runs to the model's limit", (5,) * 250, 1, long),
        Request("runs to max_tokens", (5,), 1, SamplingParams(max_tokens=3, ignore_eos=True)),
        Request("too long", (5,) * 256, 1, long),
        Request("empty", (), 1, long),
    ]
    backend.submit(requests)
    done = {c.request.id: c for c in backend.completions()}
    assert done["runs to the model's limit"].finish_reason is FinishReason.LENGTH
    assert len(done["runs to the model's limit"].tokens) == 6
    assert len(done["runs to max_tokens"].tokens) == 3
    for refused in ("too long", "empty"):
        assert done[refused].finish_reason is FinishReason.REFUSED and "255" in done[refused].error
    assert len(done) == 4 and not backend.running and not backend.waiting


def test_abort_and_submit_work_while_completions_are_read(backend):
    endless = SamplingParams(max_tokens=100, ignore_eos=True)
    backend.submit([Request(str(i), (5 + i,), i, endless) for i in range(6)])
    backend.submit([Request("short", (7,), 0, SamplingParams(max_tokens=2, ignore_eos=True))])
    backend.abort(["0", "1", "2"])
    seen = []
    for completion in backend.completions():
        seen.append(completion)
        if completion.request.id == "short":
            backend.submit([Request("late", (9,), 0, SamplingParams(max_tokens=1))])
    reasons = {c.request.id: c.finish_reason for c in seen}
    assert len(seen) == 8 and all(reasons[i] is FinishReason.ABORTED for i in "012")
    assert reasons["late"] is not FinishReason.ABORTED


def test_pause_and_weight_updates_make_segments(backend):
    request = Request("a", (5, 6, 7), 9, SamplingParams(max_tokens=20, ignore_eos=True))
    backend.submit([request, Request("b", (8,), 1, SamplingParams(max_tokens=4, ignore_eos=True))])
    for completion in backend.completions():
        assert completion.request.id == "b"
        backend.pause()
    changed = {name: tensor * 1.05 for name, tensor in exported_tensors(backend.policy)}
    backend.update_weights(7, changed.items())
    backend.resume()
    (completion,) = backend.completions()
    assert completion.segments == (Segment(0, 4, 0), Segment(4, 20, 7))
    continued = Request(
        "c", request.prompt + completion.tokens[:4], 9, SamplingParams(max_tokens=16, ignore_eos=True)
    )
    backend.submit([continued])
    (again,) = backend.completions()
    assert again.tokens == completion.tokens[4:], (
        "a sequence continued elsewhere with the same seed gives the same tokens"
    )
    assert again.logprobs == pytest.approx(completion.logprobs[4:], abs=1e-12)


def test_truncate_keeps_the_right_tokens():
    scores = torch.tensor([0.1, 3.0, 2.0, 1.0, -1.0])
    probabilities = scores.softmax(-1)

    def kept(**settings) -> list[int]:
        request = Request("", (1,), 0, SamplingParams(**settings))
        return torch.isfinite(truncate(scores, request)).nonzero().flatten().tolist()

    assert kept(top_k=2) == [1, 2]
    assert kept(top_p=float(probabilities[1]) - 1e-4) == [1]
    assert kept(top_p=float(probabilities[1]) + 1e-4) == [1, 2]
    assert kept(min_p=0.1) == [i for i in range(5) if probabilities[i] >= 0.1 * probabilities.max()]
    assert kept(top_k=3, top_p=0.999) == [1, 2, 3]


def test_decoder_config_of_a_small_model_is_read(tmp_path):
    model = small_model("qwen3")
    assert from_huggingface(model.config.to_dict()).qk_norm


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"temperature": float("nan")}, "temperature nan; it must be 0 (greedy) or a number from 1e-05"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"temperature": -0.5}, "temperature -0.5"),
        ({"temperature": 1e-38}, "temperature 1e-38"),
        ({"top_p": 0.0}, "top_p 0.0; it must be more than 0 and at most 1"),
        ({"top_p": -1.0}, "top_p -1.0"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"top_p": float("nan")}, "top_p nan"),
        ({"min_p": 1.5}, "min_p 1.5; it must be from 0, which keeps all tokens, to 1"),
        ({"min_p": -0.1}, "min_p -0.1"),
        ({"min_p": float("nan")}, "min_p nan"),
        ({"max_tokens": -1}, "max_tokens -1"),
        ({"top_logprobs": 98}, "top_logprobs 98"),
        ({"stop": ("x",)}, "stop strings need an engine with a tokenizer"),
    ],
)
def test_sampling_refusals_are_the_same_in_both_backends(settings, reason, backend):
    """And a sound request beside it is sampled as alone."""
    sound = Request("sound", (5, 6), 3, SamplingParams(max_tokens=6, ignore_eos=True))
    bad = Request("bad", (5, 6), 3, SamplingParams(**{"max_tokens": 6, **settings}))
    engine = Engine(backend.policy, EngineSettings(max_running=4, kv_tokens=1024))
    for generator in (backend, engine):
        generator.submit([sound])
        (alone,) = generator.completions()
        generator.submit([bad, sound])
        done = {c.request.id: c for c in generator.completions()}
        assert done["bad"].finish_reason is FinishReason.REFUSED and reason in done["bad"].error
        assert not done["bad"].tokens and done["sound"].tokens == alone.tokens


def test_sampling_limits_are_accepted_at_their_extremes(backend):
    """No token at all, one that is always kept, and those as likely as the first: alike in both backends."""
    engine = Engine(backend.policy, EngineSettings(max_running=4, kv_tokens=1024))
    allowed = {
        "nothing": SamplingParams(max_tokens=0),
        "first alone": SamplingParams(max_tokens=5, top_p=1e-9, ignore_eos=True),
        "as likely": SamplingParams(max_tokens=5, min_p=1.0, ignore_eos=True),
        "greedy": SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True),
    }
    results = []
    for generator in (backend, engine):
        generator.submit([Request(name, (5, 6), 3, sampling) for name, sampling in allowed.items()])
        results.append({c.request.id: (c.tokens, c.finish_reason) for c in generator.completions()})
    assert results[0] == results[1]
    assert results[0]["nothing"] == ((), FinishReason.LENGTH)
    assert results[0]["first alone"] == results[0]["as likely"] == results[0]["greedy"]
