"""`paceline simulate` as a person uses it: files, overrides, recipes, and what is refused."""

import json
import re
from typing import get_args

import pytest
import yaml
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.config import Config
from paceline.simulate.question import Question, parse_question, questions, recipe_keys
from paceline.simulate.scenario import MODES
from tests.simulate.test_model_shape import DENSE

SMALL = ["gpus=2", "prompts=4", "samples=4", "max_running=16"]
SMALL += ["mean_length=200", "length_sigma=0.8", "min_length=4", "max_length=1000"]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_answer_is_text_or_json():
    said = invoke(*SMALL, "k=paced:3")
    for words in ("measured", "assumed", "rollout", "training the drafter", "  measured  head: "):
        assert words in said
    (record,) = json.loads(invoke(*SMALL, "k=paced:3", "--json"))
    assert record["rollout_speedup"] > 1 and record["this"]["tokens"] == record["plain"]["tokens"]
    assert f"rollout {record['rollout_speedup']:.2f}x, step {record['step_speedup']:.2f}x" in said
    sources = {part["source"] for part in record["this"]["provenance"].values()}
    assert sources == {"measured", "fitted", "assumed"}


def test_list_of_values_asks_once_for_each():
    lines = invoke(*SMALL, "k=[0, 3]", "gpus=[1, 2]").splitlines()
    rows = [line.split() for line in lines if re.match(r"\s+\d\s+\d\s", line)]
    assert [row[:2] for row in rows] == [["1", "0"], ["1", "3"], ["2", "0"], ["2", "3"]]
    assert rows[0][4] == "1.00" and float(rows[1][4]) > 1
    longer = invoke(*SMALL, "k=0", "mean_length=[100, 400]").splitlines()
    assert float(longer[2].split()[1]) > float(longer[1].split()[1]) > 0


def test_show_prints_a_question_file_that_means_the_same(tmp_path):
    shown = invoke("--show", *SMALL, "k=3", "accept=0.9,0.8")
    assert set(yaml.safe_load(shown)) == set(Question.model_fields)
    file = tmp_path / "question.yaml"
    file.write_text(shown)
    assert invoke(str(file)) == invoke(*SMALL, "k=3", "accept=0.9,0.8")
    file.write_text("k: [0, 3]\nmax_running: 16\n")
    assert invoke(str(file), *SMALL) == invoke(*SMALL, "k=[0, 3]")
    assert invoke(str(file), *SMALL, "k=3") == invoke(*SMALL, "k=3"), "an override wins over the file"


def test_prompts_per_gpu_show_what_does_not_scale():
    """Transfer beyond a machine, the head that hands requests out, the tail of more responses."""
    keys = ["prompts_per_gpu=2", "samples=4", "mean_length=200", "max_length=1000", "k=0", "max_running=64"]
    small, large = json.loads(invoke(*keys, "gpus=[4, 32]", "--json"))
    assert small["this"]["tokens"] * 7 < large["this"]["tokens"]
    assert large["this"]["stages"]["sync"] > small["this"]["stages"]["sync"] > 0
    assert large["this"]["idle_share"] > small["this"]["idle_share"]
    assert large["this"]["step_seconds"] > small["this"]["step_seconds"]
    assert large["head_load"] * large["this"]["step_seconds"] == pytest.approx(32 * 2 * 4 * 3.7e-4)


def test_recipe_is_a_starting_point():
    assert "16 prompts x 8 samples" in invoke("--recipe", "default", "max_length=20", "mean_length=20")


def test_recipe_sets_precision_engine_and_devices():
    vllm = {"tensor_parallel": 4, "engine": {"quantization": "fp8"}}
    speculation = {"drafters": ["ngram"], "verify": "rejection", "pacing": "fixed"}
    rollout = {"backend": "vllm", "vllm": vllm, "speculation": speculation}
    asked = parse_question(recipe_keys(Config.model_validate({"rollout": rollout})))
    assert (asked.engine, asked.gpus, asked.tp, asked.drafter) == ("vllm", 4, 4, "history")
    assert (asked.weights, asked.kv) == ("fp8", "bf16")
    asked = parse_question(recipe_keys(Config.model_validate({"rollout": {"precision": "kv"}})))
    assert (asked.weights, asked.kv) == ("bf16", "fp8")
    cluster = {"replicas": 8, "learners": 8, "placement": "colocated"}
    asked = parse_question(recipe_keys(Config.model_validate({"cluster": cluster})))
    assert (asked.engine, asked.gpus, asked.tp, asked.weights) == ("paceline", 8, 1, "bf16")


def test_changed_mode_has_its_own_lag():
    keys = recipe_keys(Config.model_validate({"rollout": {"mode": "async", "max_lag": 3}}))
    changes = [{}, {"mode": "sync"}, {"mode": "partial", "lag": 2}, {"mode": ["one-step-off", "async"]}]
    lags = [[question.lag for _, question in questions(change, keys)] for change in changes]
    assert lags == [[3], [None], [2], [None, 3]]


def test_modes_can_all_be_asked_for():
    assert set(get_args(Question.model_fields["mode"].annotation)) == set(MODES)


def test_unused_slots_cost_nothing():
    assert invoke(*SMALL, "k=3", "max_running=1000000000000") == invoke(*SMALL, "k=3")


def test_lengths_are_cut_and_have_the_mean():
    drawn = parse_question({"mean_length": 512, "max_length": 4096}).lengths.draw(20000, seed=0)
    assert drawn.min() >= 16 and drawn.max() <= 4096 and drawn.mean() == pytest.approx(512, rel=0.05)
    equal = parse_question({"mean_length": 49, "length_sigma": 0, "length_scale": 2}).lengths
    assert set(equal.draw(100, seed=1)) == {49} and set(equal.scaled(2.0).draw(100, seed=1)) == {98}


def test_sliding_window_is_reported_as_an_upper_bound(tmp_path):
    window = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16}
    (tmp_path / "config.json").write_text(json.dumps(DENSE | window))
    keys = [f"model={tmp_path}", "k=0", "gpus=2", "prompts=2", "samples=2", "length_sigma=0"]
    assert "window: layers that see 512" in invoke(*keys, "mean_length=1000", "max_length=1000")
    assert "window:" not in invoke(*keys, "mean_length=100", "max_length=100")


@pytest.mark.parametrize(
    "words, message",
    [
        (["k=[]"], "k = []: must hold at least one value"),
        (["gpus=[8, many]"], "gpus = 'many': "),
        (["question.yaml"], "'question.yaml' is not a file: give a YAML file such as"),
        (["gpus=1", "many"], "'many' is not of the form key=value"),
        (["hardware=h300"], "neither a shipped profile (a100, b200, gb200, h100, h200)"),
        (["model=nothing"], "neither a built-in shape"),
        (["drafter=nothing"], "must be eagle, history, or a smaller model"),
        (["kv_token=5"], "kv_token: there is no such key. Did you mean 'kv_tokens'?"),
        (["min_length=9", "max_length=8"], "min_length = 9: must be at most max_length"),
        (["length_sigma=.nan"], "length_sigma = nan: "),
        (["accept=5@3"], "accept = '5@3': use 0.8, or 0.85,0.8,0.7 by depth"),
        (["k=many"], "k = 'many': use a number of draft tokens from 0 to 1024, or paced, or paced:MAX"),
        (["k=paced:-1"], "k = 'paced:-1': use a number"),
        (["k=100000"], "from 0 to 1024"),
        (["mode=later"], "mode = 'later': must be one of sync, partial, oversample, one-step-off, async"),
        (["model=qwen3-235b-a22b"], "raise tp or ep"),
        (["tp=3"], "must divide the 32 attention heads"),
        (["hardware=a100", "weights=fp8"], "has no FP8"),
        (["lag=2"], "lag = 2: mode = sync has none; use mode=partial"),
        (["gpus=0"], "gpus = 0: "),
        (["gpus=true"], "gpus = True: must be a number"),
        (["gpus=2", "tp=4"], "gpus = 2: 2 remain for generation"),
        (["prompts=0"], "prompts = 0: "),
        (["reward_seconds=-10"], "reward_seconds = -10"),
        (["mode=async", "train_share=1"], "train_share = 1: "),
        (["kv_tokens=100"], "raise kv_tokens"),
        (["kv_tokens=100000000000"], "fit beside the weights"),
        (["--ran-on=h200"], "--ran-on h200: --from-run RUN needs --ran-on"),
        (["--from-run=x", "--ran-on=h200", "--recipe=default"], "--recipe default: --from-run x has"),
        (["--from-run=nowhere", "--ran-on=h200"], "is not a run directory"),
    ],
)
def test_errors_name_the_way_out(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CliRunner().invoke(app, ["simulate", *words], catch_exceptions=False)
