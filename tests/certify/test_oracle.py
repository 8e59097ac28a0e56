"""The oracle: shares nothing with what it judges, and says what the definitions say."""

import ast
import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

import paceline.certify
from paceline.certify import noise_quality
from paceline.certify.certificate import ALPHA, Certificate
from paceline.certify.noise_quality import noise_checks
from paceline.certify.oracle import noise
from paceline.certify.oracle.choice import rejection_choice, shared_noise_choice
from paceline.certify.oracle.ending import Ending, ending
from paceline.certify.oracle.seeds import seed_of
from paceline.certify.oracle.truncation import distribution, kept, maybe_kept, surely_kept
from paceline.certify.power import found_by_chi_square, found_by_equality
from paceline.certify.requests import SETTINGS
from paceline.rollout.sampler import GroupSampler
from paceline.types import Purpose, SamplingParams

PACKAGE = Path(paceline.certify.__file__).parent

# What is judged: where sampling, verification, caching and bookkeeping happen.
JUDGED = ("kernels", "engine", "drafting", "paged", "precision", "rollout", "learning")

# The files that make a subject of what is judged, or call it in order to judge it.
BRIDGES = {"native.py", "fp8.py", "subjects.py", "kernels_alone.py", "parity.py"}


def imports(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    found = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return found | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


# -- nothing is shared -----------------------------------------------------------------------------


def test_oracle_imports_nothing_of_paceline():
    files = list((PACKAGE / "oracle").glob("*.py"))
    assert len(files) >= 6
    for file in files:
        strangers = {
            name
            for name in imports(file)
            if name.startswith("paceline") and not name.startswith("paceline.certify.oracle")
        }
        assert not strangers, f"{file.name} imports {strangers}: what it judges may share its bugs"


def test_judged_code_is_imported_by_the_subjects_only():
    for file in PACKAGE.glob("*.py"):
        judged = {name for name in imports(file) if name.split(".")[1:2] and name.split(".")[1] in JUDGED}
        assert not judged or file.name in BRIDGES, f"{file.name} imports {judged}"


def test_judged_code_does_not_import_the_oracle():
    for package in JUDGED:
        for file in (PACKAGE.parent / package).rglob("*.py"):
            assert not any(name.startswith("paceline.certify") for name in imports(file)), file


# -- noise and seeds -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_has_random123s_known_answers(counter, key, words):
    made = noise.philox([torch.tensor(x) for x in counter], [torch.tensor(x) for x in key])
    assert tuple(int(word) for word in made) == words


@pytest.mark.slow
def test_noise_checks_pass_sound_noise_and_fail_weak_noise(monkeypatch):
    def decided(checks):
        return {check.name for check in Certificate.of("", {}, checks, 0.0).failed}

    assert not decided(noise_checks(192, 0))
    sound = noise_quality.noise_bits

    def planted(change):
        monkeypatch.setattr(noise_quality, "noise_bits", change)
        return decided(noise_checks(192, 0))

    assert planted(lambda s, p, v, stream=0: sound(s, p // 2, v, stream))
    assert planted(lambda s, p, v, stream=0: sound(s, p, v, 0))
    assert planted(lambda s, p, v, stream=0: sound(s >> 1 << 1, p, v, stream))
    assert planted(lambda s, p, v, stream=0: sound(s, p, v, stream) | 1)
    lcg = 6364136223846793005
    assert planted(
        lambda s, p, v, stream=0: ((s + p)[:, None] * lcg + torch.arange(v) * lcg >> 32) & 0xFFFFFFFF
    )
    monkeypatch.setattr(noise, "ROUNDS", 2)
    assert planted(sound)


class OneToken:
    """Stands in for a task: every problem's prompt is one token."""

    prompts = SimpleNamespace(encode=lambda problem: (3,))
    turns = None


def test_requests_of_a_step_have_the_published_seeds():
    sampler = GroupSampler(backend=None, task=OneToken(), tokenizer=None, run_seed=5)
    problems = [SimpleNamespace(id=name) for name in ("a", "b", "a")]
    groups = sampler._requests(problems, Purpose.TRAIN, 7, 4, SamplingParams())
    made = [[request.seed for request in group] for group in groups]
    places = [("a", 0), ("b", 0), ("a", 1)]
    assert made == [[seed_of("train", 5, 7, name, n, i) for i in range(4)] for name, n in places]


# -- truncation ------------------------------------------------------------------------------------


def kept_by_brute_force(scores: list[float], sampling: SamplingParams) -> set[int]:
    """One token after the other, with Python's own numbers."""
    order = sorted(range(len(scores)), key=lambda x: (-scores[x], x))
    left = order[: sampling.top_k] if sampling.top_k else order
    total = math.fsum(math.exp(scores[x]) for x in left)
    chosen, mass = [], 0.0
    for x in left:
        if mass / total < sampling.top_p or sampling.top_p >= 1:
            chosen.append(x)
        mass += math.exp(scores[x])
    limit = sampling.min_p * math.exp(scores[order[0]])
    return {x for x in chosen if math.exp(scores[x]) >= limit} | {order[0]}


@pytest.mark.parametrize("sampling", SETTINGS)
def test_truncation_is_that_of_a_brute_force(sampling):
    scores_NV = torch.randn(40, 13, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2
    scores_NV[::4] = scores_NV[::4].round()  # ties
    found_NV = kept(scores_NV, sampling)
    for scores, found in zip(scores_NV.tolist(), found_NV, strict=True):
        assert set(found.nonzero().flatten().tolist()) == kept_by_brute_force(scores, sampling)
    p_NV = distribution(scores_NV * (sampling.temperature or 1.0), sampling)
    assert torch.allclose(p_NV.sum(1), torch.ones(40, dtype=torch.float64))
    if sampling.temperature:
        assert torch.equal(p_NV > 0, found_NV)


@pytest.mark.parametrize("sampling", [s for s in SETTINGS if s.truncates])
def test_rounding_stays_between_surely_kept_and_maybe_kept(sampling):
    generator = torch.Generator().manual_seed(4)
    scores_NV = torch.randn(200, 11, generator=generator, dtype=torch.float64)
    slack_N = torch.full((200,), 0.05, dtype=torch.float64)
    surely_NV = surely_kept(scores_NV, sampling, slack_N)
    maybe_NV = maybe_kept(scores_NV, sampling, slack_N)
    for _ in range(30):
        moved_NV = scores_NV + 0.1 * (torch.rand(scores_NV.shape, generator=generator) - 0.5)
        found_NV = kept(moved_NV, sampling)
        assert not (surely_NV & ~found_NV).any() and not (found_NV & ~maybe_NV).any()
    assert (surely_NV != maybe_NV).any(), "and some of it does change"


# -- choices ---------------------------------------------------------------------------------------


def test_decided_choice_is_never_moved_by_rounding():
    generator = torch.Generator().manual_seed(5)
    seeds, positions = torch.arange(300), torch.arange(300) % 17
    logits_NV = torch.randn(300, 19, generator=generator, dtype=torch.float64) * 2
    tolerance_N = torch.full((300,), 0.02, dtype=torch.float64)
    for sampling in SETTINGS:
        choice = shared_noise_choice(logits_NV, sampling, seeds, positions, tolerance_N)
        for _ in range(5):
            moved_NV = logits_NV + 0.04 * (torch.rand(logits_NV.shape, generator=generator) - 0.5)
            other_N = shared_noise_choice(moved_NV, sampling, seeds, positions, tolerance_N).token_N
            assert choice.explains(other_N).all()
        assert 0.8 < choice.decided_N.double().mean() <= 1


@pytest.mark.parametrize("known", [True, False])
def test_rejection_draws_from_the_policy(known):
    """Whatever is proposed; that it is the published rule's outcome is what the certificate relies on."""
    count = 20000
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    q = torch.tensor([0.1, 0.6, 0.1, 0.2], dtype=torch.float64)
    logits, draft = (x.log().expand(count, -1) for x in (p, q))
    seeds, positions = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    tolerance = torch.zeros(count, dtype=torch.float64)
    proposed = None if known else torch.arange(count) % 4
    choice = rejection_choice(
        logits, draft if known else None, proposed, SamplingParams(1.0), seeds, positions, tolerance
    )
    counts = torch.bincount(choice.token_N, minlength=4)
    assert stats.chisquare(counts.numpy(), (p * count).numpy()).pvalue > 1e-3


# -- ends and power --------------------------------------------------------------------------------


def test_ending_follows_stop_tokens_texts_and_limits():
    letters = "".join
    text = list("abcab")
    assert ending(text, frozenset("c"), (), letters, 9) == Ending(3, "stop")
    assert ending(text, frozenset(), ("ca",), letters, 9) == Ending(4, "stop")
    assert ending(text, frozenset(), (), letters, 2) == Ending(2, "length")
    assert ending(text, frozenset("b"), (), letters, 2) == Ending(2, "stop")
    assert ending(text, frozenset(), ("x",), letters, 9) == Ending(5, "")


def test_stated_power_is_the_power():
    """Exact: a token differs with the stated probability; of many certificates 90% see one or more."""
    rng = random.Random(0)
    tokens = 60
    share = found_by_equality(tokens)
    seen = sum(any(rng.random() < share for _ in range(tokens)) for _ in range(4000)) / 4000
    assert seen == pytest.approx(0.9, abs=0.02)
    # Statistics: a fair coin, one degree of freedom.
    shift = found_by_chi_square(1000, 250.0, 1, ALPHA)
    critical = stats.chi2.isf(ALPHA, 1)
    found = stats.ncx2.sf(critical, 1, (1000 * shift) ** 2 / 250)
    assert found == pytest.approx(0.9, abs=0.01)
    assert all(a > b for a, b in itertools.pairwise(found_by_equality(n) for n in (10, 100, 1000)))
