"""Wrong recipes get an error that names the key, the value and the way out."""

import pytest

from paceline.config import Config, ConfigError, changed_keys, dump_config, load_config, shipped_recipes


def explain(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


def test_unknown_keys_name_the_nearest():
    message = explain("learning.learning_rate=1")
    assert "learning.learning_rate: there is no such key" in message and "lr_schedule" in message
    assert "Did you mean 'rollout.temperature'?" in explain("rollout.temprature=1")
    assert "Did you mean 'rollout'?" in explain("rolout.temperature=1")
    assert "Did you mean 'rollout.max_running'?" in explain("learning.max_running=3"), "right key, wrong section"


def test_wrong_values_name_what_is_allowed():
    assert explain("run.device=gpu") == "run.device = 'gpu': must be one of auto, cpu, cuda. Did you mean 'cpu'?"
    assert "rollout.temperature = -1" in explain("rollout.temperature=-1")
    assert "learning.lr = 'fast'" in explain("learning.lr=fast")
    assert "must divide rollout.prompts_per_step = 16" in explain("learning.minibatches=5")
    assert "between 1 and eval.samples = 2" in explain("eval.samples=2", "eval.pass_k=[4]")
    assert "section.key=value" in explain("learning.lr")
    assert "is a value, not a section" in explain("run.seed=1", "run.seed.x=2")


def test_several_mistakes_are_reported_together():
    message = explain("run.device=gpu", "learning.lrr=1")
    assert "run.device" in message and "learning.lrr" in message


def test_overrides_win_over_the_recipe(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("learning: {lr: 1.0e-5, kl_coef: 0.1}\nrun: {steps: 3}\n")
    config = load_config(str(recipe), ["learning.lr=2e-6", "eval.samples=4", "eval.pass_k=[1,4]"])
    assert (config.learning.lr, config.learning.kl_coef, config.run.steps, config.eval.pass_k) == (2e-6, 0.1, 3, [1, 4])


def test_bad_files(tmp_path):
    with pytest.raises(ConfigError, match="neither a file nor a shipped recipe.*Did you mean 'default'"):
        load_config("defualt")
    (tmp_path / "bad.yaml").write_text("run: [unclosed")
    with pytest.raises(ConfigError, match="not readable YAML"):
        load_config(str(tmp_path / "bad.yaml"))
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="must hold sections"):
        load_config(str(tmp_path / "list.yaml"))


def test_dump_and_load_round_trip(tmp_path):
    config = load_config(None, ["learning.lr=3e-7", "eval.samples=2", "eval.pass_k=[2]"])
    (tmp_path / "c.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "c.yaml")) == config


def test_changed_keys():
    assert changed_keys(Config(), load_config(None, ["learning.lr=0.5"])) == {"learning.lr": (1e-6, 0.5)}


def test_shipped_recipes_are_valid():
    assert "default" in shipped_recipes()
    for name in shipped_recipes():
        load_config(name)


def test_a_backend_without_fp8_refuses_it():
    """Silently in base precision, the run's figures would be called FP8's."""
    with pytest.raises(ConfigError, match="precision = 'fp8[+]kv' needs backend: native"):
        load_config(None, ["rollout.backend=reference", "rollout.precision=fp8+kv"])
    assert load_config(None, ["rollout.backend=reference"]).rollout.precision == "bf16"
