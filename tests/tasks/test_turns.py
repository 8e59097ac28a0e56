"""Turns: a tool's answer follows what the policy wrote, and the merged completion is one long sample's."""

import time

import pytest
import torch

from paceline.config import RewardConfig, RolloutConfig, TaskConfig, TurnsConfig, load_config
from paceline.engine.factory import make_engine
from paceline.engine.reference import ReferenceBackend
from paceline.loop import train
from paceline.policy.attention import PackedAttention
from paceline.policy.huggingface import load_policy
from paceline.policy.tokenizer import load_tokenizer
from paceline.rollout.sampler import GroupSampler
from paceline.stats import RolloutStats
from paceline.tasks.base import Done, Observation, Problem, Turn
from paceline.tasks.calculator import calculate, step
from paceline.tasks.make import make_task
from paceline.types import Completion, FinishReason, Purpose, Request, SamplingParams, Segment
from tests.loop_helpers import comparable_metrics, make_tiny_policy, tiny_overrides
from tests.tasks.test_chat import CHATML, byte_tokenizer, save_folder

EXAMPLES = "tests.tasks.reward_examples"


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def make_sampler(policy_folder):
    opened = []

    def make(backend="native", tool="echo_twice", stop=(";", "a"), **rollout):
        policy = load_policy(policy_folder, torch.float32)
        tokenizer = load_tokenizer(policy_folder)
        config = TaskConfig(
            turns=TurnsConfig(step=f"{EXAMPLES}:{tool}", stop=list(stop)), train_problems=5, eval_problems=1
        )
        task = make_task(config, tokenizer, policy_folder)
        settings = RolloutConfig(max_running=16, **rollout)
        engine = (
            ReferenceBackend(policy, 16, tokenizer)
            if backend == "reference"
            else make_engine(policy, settings, 4096, tokenizer)
        )
        opened.append(GroupSampler(engine, task, tokenizer, run_seed=5))
        return opened[-1]

    yield make
    for sampler in opened:
        sampler.close()


def completions_of(sampler, samples=4, max_tokens=60, **sampling):
    groups = sampler.sample(
        sampler.task.train, Purpose.TRAIN, 1, samples, SamplingParams(max_tokens=max_tokens, **sampling)
    )
    return [sample.completion for group in groups for sample in group.samples], [
        s.score for g in groups for s in g.samples
    ]


def test_merged_completions_have_the_observations_between_sampled_segments(make_sampler):
    sampler = make_sampler()
    completions, _ = completions_of(sampler)
    turns = [[s.sampled for s in c.segments] for c in completions]
    assert [True, False, True, False, True] in turns, "some go through all three turns"
    for completion in completions:
        spans = [(s.start, s.stop) for s in completion.segments]
        assert spans[0][0] == 0 and spans[-1][1] == len(completion.tokens) == len(completion.logprobs)
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
        observed = [s for s in completion.segments if not s.sampled]
        assert [sampler.tokenizer.decode(completion.tokens[s.start : s.stop]) for s in observed] == [
            "1;",
            "2;",
        ][: len(observed)]
        for token_sampled, logprob in zip(completion.loss_mask, completion.logprobs, strict=True):
            assert (logprob < 0) if token_sampled else (logprob == 0.0)
        assert (
            len(completion.tokens) <= 60
            and completion.segments[-1].sampled
            and not completion.request.continues
        )


def test_turn_equals_a_fresh_request_with_everything_so_far(make_sampler):
    """The oracle: the reference backend, asked anew for every turn with everything so far as its prompt."""
    sampler = make_sampler()
    completions, _ = completions_of(sampler)
    fresh = ReferenceBackend(sampler.backend.policy, 16, sampler.tokenizer)
    wanted = {}
    for c in completions:
        for n, s in enumerate(s for s in c.segments if s.sampled):
            sampling = SamplingParams(max_tokens=60 - s.start, stop=(";", "a"))
            request = Request(
                f"{c.request.id}#{n}", c.request.prompt + c.tokens[: s.start], c.request.seed, sampling
            )
            fresh.submit([request])
            wanted[request.id] = c.tokens[s.start : s.stop]
    assert {c.request.id: c.tokens for c in fresh.completions()} == wanted


def test_merged_logprobs_are_those_of_one_forward_pass(make_sampler):
    sampler = make_sampler()
    completions, _ = completions_of(sampler)
    policy = sampler.backend.policy
    for c in completions:
        whole = torch.tensor([*c.request.prompt, *c.tokens])
        packed = PackedAttention([len(whole)], policy.device)
        with torch.no_grad():
            logprobs = policy.logits(policy(whole, packed.positions_T, packed)).log_softmax(-1)
        start = len(c.request.prompt)
        expected = logprobs[start - 1 : -1].gather(1, whole[start:, None]).squeeze(1)
        mask = torch.tensor(c.loss_mask)
        assert torch.allclose(expected[mask], torch.tensor(c.logprobs)[mask], atol=1e-4)


@pytest.mark.slow
def test_backends_agree_on_turns_and_hold_no_cache_afterwards(make_sampler):
    native = make_sampler()
    reference = make_sampler("reference")
    tight = make_sampler(kv_tokens=320)
    tokens = [c.tokens for c in completions_of(native)[0]]
    assert tokens == [c.tokens for c in completions_of(reference)[0]]
    assert tokens == [c.tokens for c in completions_of(tight)[0]], "also when held caches have to be given up"
    assert tokens == [c.tokens for c in completions_of(native)[0]], "again, on the same backend"
    for sampler in (native, tight):
        assert not sampler.backend.paused
        assert sampler.backend.pool.free == sampler.backend.pool.num_blocks - 1, "no cache is held any more"


def test_max_tokens_covers_observations(make_sampler):
    completions, _ = completions_of(make_sampler(), max_tokens=4)
    assert all(c.truncated for c in completions), "the tool would answer twice, and there is no room for that"
    assert all(len(c.tokens) <= 4 and c.segments[-1].sampled for c in completions)
    assert any(c.truncated and len(c.tokens) < 4 for c in completions), (
        "a turn without room for a response is not begun"
    )


@pytest.mark.slow
def test_top_logprobs_stay_aligned_across_turns(make_sampler):
    completions, _ = completions_of(make_sampler(), samples=1, top_logprobs=2)
    for c in completions:
        assert [len(top) for top in c.top_logprobs] == [2 if sampled else 0 for sampled in c.loss_mask]


@pytest.mark.parametrize(
    "tool, message",
    [
        ("broken_tool", "out of order"),
        pytest.param("wrong_tool", "must return Observation or Done", marks=pytest.mark.slow),
        pytest.param("garbled_tool", "must be text or messages", marks=pytest.mark.slow),
    ],
)
def test_tool_that_fails_ends_the_conversation_and_is_counted(make_sampler, caplog, tool, message):
    completions, scores = completions_of(make_sampler(tool=tool))
    assert all(len(c.segments) == 1 for c in completions) and message in caplog.text
    stopped = [c.finish_reason is FinishReason.STOP for c in completions]
    assert any(stopped) and [s.components.get("failed/step/error") == 1.0 for s in scores] == stopped


class Script:
    """A backend that answers from a list of texts per request; those in `slow` finish after all others."""

    def __init__(self, tokenizer, texts, slow=()):
        self.tokenizer = tokenizer
        self.texts = texts
        self.slow = slow
        self.requests = []
        self.seen = []
        self.paused = False

    def submit(self, requests):
        self.requests += requests
        self.seen += requests

    def completions(self):
        deadline = time.monotonic() + 120
        while self.requests and not self.paused:
            others_done = not any(texts for name, texts in self.texts.items() if name not in self.slow)
            ready = [r for r in self.requests if others_done or r.id not in self.slow]
            if not ready:
                assert time.monotonic() < deadline, (
                    "the continuation was not submitted while another sample was still running"
                )
                time.sleep(0.01)
                continue
            request = ready[0]
            self.requests.remove(request)
            tokens = tuple(self.tokenizer.encode(self.texts[request.id].pop(0), add_special_tokens=False).ids)
            yield Completion(
                request, tokens, (-1.0,) * len(tokens), FinishReason.STOP, (Segment(0, len(tokens), 3),)
            )

    def pause(self):
        self.paused = True

    def resume(self):
        self.paused = False

    def abort(self, ids):
        self.aborted = set(ids)

    def take_stats(self):
        return RolloutStats()


def calculator_task(folder, **settings):
    return make_task(
        TaskConfig(name="calculator", train_problems=4, eval_problems=1, **settings), byte_tokenizer(), folder
    )


def test_calculator_replies_while_other_samples_generate(tmp_path):
    task = calculator_task(tmp_path)
    problem = task.train[0]
    question = problem.prompt.removeprefix("What is ").removesuffix("?")
    texts = {
        "train/1/0/0": [
            "Let me see. <calc>1/0</calc>",
            f"<calc>{question}</calc>",
            f"So\nAnswer: {problem.answer}",
        ],
        "train/1/0/1": ["Answer: 1"],
    }
    backend = Script(byte_tokenizer(), texts, slow={"train/1/0/1"})
    sampler = GroupSampler(backend, task, byte_tokenizer(), 0)
    right, wrong = sampler.sample([problem], Purpose.TRAIN, 1, 2, SamplingParams(max_tokens=200))[0].samples
    sampler.close()
    text = byte_tokenizer().decode(right.completion.tokens)
    assert text == (
        "Let me see. <calc>1/0</calc> error: Fraction(1, 0)\n"
        f"<calc>{question}</calc> = {problem.answer}\nSo\nAnswer: {problem.answer}"
    )
    assert right.score.correct and not wrong.score.correct
    assert backend.seen[0].sampling.stop == ("</calc>",) and backend.seen[0].hold
    second, third = backend.seen[2:]
    assert (
        second.continues == third.continues == second.id == "train/1/0/0"
        and second.seed == backend.seen[0].seed
    )
    assert byte_tokenizer().decode(third.prompt) == problem.prompt + text.removesuffix(
        f"So\nAnswer: {problem.answer}"
    )
    assert third.sampling.max_tokens == 200 - (len(third.prompt) - len(backend.seen[0].prompt))
    assert backend.aborted == set(texts) and not backend.paused


def test_observation_does_not_count_as_an_answer(tmp_path):
    """The tool may print the right answer; only what the policy says counts."""
    task = calculator_task(tmp_path, rewards=[RewardConfig(function="last-number")])
    problem = task.train[0]
    question = problem.prompt.removeprefix("What is ").removesuffix("?")
    backend = Script(byte_tokenizer(), {"train/1/0/0": [f"<calc>{question}</calc>", "I do not know"]})
    sampler = GroupSampler(backend, task, byte_tokenizer(), 0)
    sample = sampler.sample([problem], Purpose.TRAIN, 1, 1, SamplingParams(max_tokens=200))[0].samples[0]
    sampler.close()
    assert problem.answer in byte_tokenizer().decode(sample.completion.tokens) and not sample.score.correct


def test_tools_may_answer_with_chat_messages(tmp_path):
    (tmp_path / "tools.py").write_text(
        "from paceline.tasks.base import Done, Observation\n"
        "def ask(problem, conversation, question):\n"
        "    if len(conversation) > 1:\n"
        "        return Done()\n"
        "    return Observation(({'role': 'user', 'content': question},))\n"
    )
    folder = save_folder(tmp_path / "policy", CHATML)
    turns = TurnsConfig(step=f"{tmp_path}/tools.py:ask", options={"question": "Sure?"})
    task = calculator_task(folder, turns=turns, chat=True)
    backend = Script(byte_tokenizer(), {"train/1/0/0": ["five<|im_end|>", "Answer: 4<|im_end|>"]})
    sampler = GroupSampler(backend, task, byte_tokenizer(), 0)
    sample = sampler.sample([Problem("p", "2+2?", "4")], Purpose.TRAIN, 1, 1, SamplingParams(max_tokens=200))[
        0
    ].samples[0]
    sampler.close()
    whole = byte_tokenizer().decode(
        sample.completion.request.prompt + sample.completion.tokens, skip_special_tokens=False
    )
    chat = [
        ("system", "Be kind"),
        ("user", "2+2?"),
        ("assistant", "five"),
        ("user", "Sure?"),
        ("assistant", "Answer: 4"),
    ]
    assert whole == "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in chat).removesuffix(
        "\n"
    )
    assert sample.score.correct


@pytest.mark.slow
def test_run_with_turns_learns_and_repeats(policy_folder, tmp_path):
    extra = [
        f"task.turns.step={EXAMPLES}:echo_twice",
        "task.turns.stop=[';', 'a']",
        f"task.rewards=[{{function: '{EXAMPLES}:length'}}]",
    ]
    runs = [
        train(
            load_config(None, [*tiny_overrides(policy_folder, tmp_path, name, steps=2), *extra])
        ).summary.run
        for name in ("a", "b")
    ]
    # How many steps the engine takes depends on when the tool answers; what is sampled and learned does not.
    timing = ("rollout/decode_steps", "rollout/tail_steps", "speculation/")
    metrics, again = (
        [{k: v for k, v in m.items() if not k.startswith(timing)} for m in comparable_metrics(run)]
        for run in runs
    )
    assert metrics == again
    trained = [m for m in metrics if m["kind"] == "train"]
    assert all(m["policy/skipped"] == 0 for m in trained)
    assert all(m["policy/largest_logprob_delta"] < 1e-4 for m in trained), (
        "observations are outside the comparison, hence the loss"
    )


@pytest.mark.parametrize(
    "expression, result",
    [
        ("47 * 86", "4042"),
        ("1/4", "0.25"),
        ("1/3", "0.3333333333"),
        ("-(2+3)*2", "-10"),
        ("7 // 2 + 7 % 2", "4"),
        ("0.1+0.2", "0.3"),
        (" 10 ", "10"),
    ],
)
def test_calculate_evaluates_expressions(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2**9",
        "__import__('os')",
        "a+1",
        "1;2",
        "9" * 201,
        "1+",
        "9" * 39 + "*99",
        "1e999",
        "1j",
        "True",
        "'a'*9",
    ],
)
def test_calculate_refuses_other_expressions(expression):
    with pytest.raises(ValueError):
        calculate(expression)


def test_calculator_step_answers_calls():
    problem = Problem("p", "?", "")

    def answer(text):
        return step(problem, (Turn(text, sampled=True),))

    assert answer("x <calc>6*7</calc>") == Observation(" = 42\n")
    assert answer("<calc>6*</calc>") == Observation(" error: not an arithmetic expression\n")
    assert answer("<calc>6*7</calc> is it") == Done() and answer("Answer: 42") == Done()
