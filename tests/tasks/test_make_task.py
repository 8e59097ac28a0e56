"""Tasks from recipes: reasoning-gym, GSM8K from files, and recipes that cannot work."""

import json
import sys

import pytest

from paceline.config import ConfigError, load_config, parse_config
from paceline.tasks import make
from paceline.tasks.base import Response
from paceline.tasks.make import make_task
from paceline.tasks.reasoning_gym import ReasoningGymProblems
from tests.tasks.test_chat import CHATML, byte_tokenizer, save_folder

GYM_OPTIONS = "task.options={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"

# In the style of GSM8K, written for this test.
ROWS = [
    {
        "question": f"Ann has {a} pears and buys {b} bags of {c}. How many pears does she have?",
        "answer": f"She buys {b}*{c} = <<{b}*{c}={b * c}>>{b * c} pears.\n"
        f"Then she has {a}+{b * c}.\n#### {a + b * c:,}",
    }
    for a, b, c in [(3, 2, 5), (1200, 4, 25), (7, 1, 9), (0, 3, 3), (10, 10, 10), (5, 6, 7)]
]


@pytest.fixture
def open_task(tmp_path):
    folder = save_folder(tmp_path / "policy", CHATML)
    opened = []

    def make(recipe, *overrides):
        opened.append(make_task(load_config(recipe, overrides).task, byte_tokenizer(), folder))
        return opened[-1]

    yield make
    for task in opened:
        task.close()


def score(task, problem, *texts, truncated=False):
    group = task.scoring.open_group(problem, len(texts))
    for index, text in enumerate(texts):
        group.add(index, Response(text, truncated))
    return group.scores()


def refused(open_task, *arguments):
    with pytest.raises(ConfigError) as caught:
        open_task(*arguments)
    return str(caught.value)


def needs_gym():
    return pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install -e '.[reasoning]'")


def test_gsm8k_recipe_reads_and_scores_the_users_files(open_task, tmp_path):
    for name, rows in (("train", ROWS[:4]), ("test", ROWS[4:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = open_task(
        "gsm8k", f"task.data.path={tmp_path}/train.jsonl", f"task.data.held_out_path={tmp_path}/test.jsonl"
    )
    assert [p.answer for p in task.train] == ["13", "1,300", "16", "9"] and len(task.held_out) == 2
    prompt = byte_tokenizer().decode(task.prompts.encode(task.train[0]), skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nAnn has 3 pears")
    assert prompt.endswith("<|im_start|>assistant\n")
    scores = score(
        task,
        task.train[1],
        "4*25 = 100\n#### 1300",
        "#### $1,300.00 pears",
        "it is 1300",
        "#### 1300\nor\n#### 7",
        "",
    )
    assert [s.correct for s in scores] == [True, True, False, False, False] and scores[0].components == {
        "correct": 1.0
    }
    assert not score(task, task.train[1], "#### 1300", truncated=True)[0].correct, (
        "cut off: it may have gone on"
    )
    assert all(score(task, p, p.extra["answer"])[0].correct for p in task.train), (
        "the given solutions are right"
    )
    assert "task.data.path is empty" in refused(open_task, "gsm8k")


@pytest.mark.slow
@pytest.mark.ci
def test_reasoning_gym_opens_a_dataset_by_name_and_options(open_task):
    needs_gym()
    base = ["task.name=reasoning-gym", "task.dataset=chain_sum", GYM_OPTIONS, "task.extract=answer-line"]
    base += ["task.train_problems=20", "task.eval_problems=10"]
    task = open_task(None, *base)
    prompts = [p.prompt for p in (*task.train, *task.held_out)]
    assert len(task.train) == 20 and len(set(prompts)) == 30
    options = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    again, other = (ReasoningGymProblems("chain_sum", options, seed, 20, 10) for seed in (0, 1))
    assert (
        prompts
        == [p.prompt for p in (*again.train, *again.held_out)]
        != [p.prompt for p in (*other.train, *other.held_out)]
    )
    for problem in task.train:
        terms = problem.prompt.partition(": ")[2].removesuffix(" =")
        right, padded, silent = score(
            task,
            problem,
            f"I see.\nAnswer: {eval(terms)}",
            f"Answer: {eval(terms)} or maybe another",
            str(eval(terms)),
        )
        assert right.reward == 1.0 and right.correct and not padded.correct and silent.reward == 0.0
    assert score(task, task.train[0], f"Answer: {task.train[0].answer}", truncated=True)[0].reward == 0.0


@pytest.mark.slow
@pytest.mark.ci
def test_reasoning_gym_verifiers_that_raise_or_pay_for_anything_are_guarded(open_task):
    needs_gym()
    task = open_task(
        None,
        "task.name=reasoning-gym",
        "task.dataset=prime_factorization",
        "task.train_problems=2",
        "task.eval_problems=1",
    )
    junk, right = score(task, task.train[0], "((", task.train[0].answer)
    assert junk.reward == 0.0 and junk.components["failed/verifier/error"] == 1.0 and right.correct
    task = open_task(
        None,
        "task.name=reasoning-gym",
        "task.dataset=countdown",
        "task.train_problems=2",
        "task.eval_problems=1",
    )
    assert score(task, task.train[0], "junk")[0].reward == 0.0, "the package itself pays 0.01 to 0.05"


@pytest.mark.slow
@pytest.mark.ci
def test_chain_sum_recipe_scores_responses(open_task):
    needs_gym()
    task = open_task("chain-sum")
    problem = task.train[0]
    assert [
        s.correct for s in score(task, problem, f"That is {problem.answer}.", f"{problem.answer} or 99")
    ] == [True, False]


@pytest.mark.slow
@pytest.mark.ci
def test_reasoning_gym_errors_name_the_way_out(open_task):
    needs_gym()
    gym = ["task.name=reasoning-gym", GYM_OPTIONS, "task.dataset=chain_sum"]
    assert "Did you mean 'chain_sum'?" in refused(open_task, None, *gym[:2], "task.dataset=chainsum")
    message = refused(open_task, None, *gym, "task.options.max_trems=3")
    assert "it knows" in message and "max_terms" in message
    assert "min_terms must be positive" in refused(open_task, None, *gym, "task.options.min_terms=0")
    message = refused(open_task, None, *gym)  # 128 + 512 problems of this kind do not exist
    assert "has 200 different problems" in message and "lower them or widen task.options" in message


def test_missing_package_errors_name_the_extra(open_task, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # importing it now fails
    assert "pip install -e '.[reasoning]'" in refused(
        open_task, None, "task.name=reasoning-gym", "task.dataset=chain_sum"
    )
    monkeypatch.setitem(make.EXTRAS, "math-verify", ("no_such_package", "math"))
    assert "pip install -e '.[math]'" in refused(open_task, None, "task.rewards=[{function: math-verify}]")


def test_task_recipes_that_cannot_work_are_refused():
    def explain(**task):
        with pytest.raises(ConfigError) as caught:
            parse_config({"task": task})
        return str(caught.value)

    given = "task.dataset = 'chain_sum' does not apply to task.name = 'running-sums', only to reasoning-gym"
    assert given in explain(dataset="chain_sum")
    assert "task.train_problems = 5 does not apply to task.name = 'file'" in explain(
        name="file", train_problems=5, rewards=[{"function": "exact"}]
    )
    assert "needs task.dataset" in explain(name="reasoning-gym")
    assert "needs task.rewards, such as" in explain(name="file")
    assert "must contain {prompt}" in explain(prompt_format="no")
    message = explain(name="reasoning_gym")
    assert "must be one of running-sums, calculator, countdown, reasoning-gym, file." in message
    assert "Did you mean 'reasoning-gym'?" in message


def test_make_task_refuses_further_mistakes(open_task, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    file = [
        "task.name=file",
        f"task.data.path={tmp_path}/a.jsonl",
        "task.data.prompt_column=question",
        "task.data.held_out_share=0.5",
    ]
    assert "has no verifier of its own; use exact" in refused(
        open_task, None, *file, "task.rewards=[{function: task}]"
    )
    assert "must be one of calculator, module:function" in refused(
        open_task, None, "task.turns.step=calculater"
    )
    assert "'exact' takes one response at a time" in refused(
        open_task, None, "task.rewards=[{function: exact, batch: true}]"
    )
    assert "is a coroutine; a tool must be" in refused(
        open_task, None, "task.turns.step=tests.tasks.reward_examples:judge"
    )
    tool = "task.turns.step=tests.tasks.reward_examples:length"
    assert "is called with (problem, conversation) and cannot be: too many positional" in refused(
        open_task, None, tool
    )
    assert "is called with (problem, conversation, size=...)" in refused(
        open_task, None, tool, "task.turns.options={size: 1}"
    )
    assert "leaves no training prompts" in refused(open_task, None, "task.max_prompt_tokens=1")
    assert "set task.chat=true" in refused(open_task, None, "task.system_prompt=x")
    assert "neither whole, answer-line nor a regular expression" in refused(
        open_task, None, "task.extract=(unclosed"
    )
    assert "with a group around the answer" in refused(open_task, None, "task.extract=answer_line")


def test_make_task_checks_that_every_prompt_of_a_file_renders(open_task, tmp_path):
    """Also one that is the last to be asked, or held out, and one that a template renders as nothing."""
    ask = [{"role": "user", "content": "1 + 1?"}]
    file = tmp_path / "chats.jsonl"
    held_out = tmp_path / "held_out.jsonl"
    given = [
        *("task.name=file", f"task.data.path={file}", f"task.data.held_out_path={held_out}"),
        "task.rewards=[{function: last-number}]",
    ]

    def write(path, *further):
        own = [{"prompt": [{"role": "user", "content": f"{path.name} {n}"}]} for n in range(20)]
        path.write_text("".join(json.dumps({"answer": "2", **row}) + "\n" for row in (*own, *further)))

    write(file)
    write(held_out, {"prompt": ask})
    open_task("default", *given)
    # CHATML adds a role and a content, which must both be texts
    for bad in ({"prompt": [*ask, {"role": "user"}]}, {"prompt": [{"role": "user", "content": 5}]}):
        write(file, bad)
        assert refused(open_task, "default", *given).startswith(f"{file}:21: the policy's chat template ")
        assert f"{file}:21: " in refused(open_task, "default", *given, "task.max_prompt_tokens=500")
    write(file)
    write(held_out, {"prompt": [{"role": "user", "content": None}]})
    assert refused(open_task, "default", *given).startswith(f"{held_out}:21: the policy's chat template ")


def test_make_task_refuses_settings_that_the_tasks_own_verifier_would_ignore(open_task):
    own = "default", "task.rewards=[{{function: task, {}}}]"
    for setting, named in (
        ("time_limit: 3", "time_limit"),
        ("options: {a: 1}", "options"),
        ("concurrency: 2",) * 2,
    ):
        said = refused(open_task, own[0], own[1].format(setting))
        assert (
            f"task.rewards: {named.split(':')[0]} would be ignored, since 'running-sums' has a verifier"
            in said
        )
    open_task(own[0], own[1].format("time_limit: 10.0"))
    said = refused(open_task, "default", "task.rewards=[{function: exact, concurrency: 2}]")
    assert "concurrency = 2 applies to coroutines, and 'exact' is none" in said
