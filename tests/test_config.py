"""Wrong recipes get an error that names the key, the value and the way out."""

from pathlib import Path
from typing import get_args, get_origin

import pytest
import yaml
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.config import (
    ALGORITHM_DEFAULTS,
    CORRECTION_PRESETS,
    Config,
    ConfigError,
    Section,
    changed_keys,
    dump_config,
    learning_notes,
    load_config,
    rollout_notes,
    shipped_recipes,
)
from paceline.config.reading import parse_config, refuse_mistyped_keys
from paceline.config.removed import REMOVED

FILE = "task.rewards=[{function: last-number}]"


def explain(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


def test_removed_keys_are_dropped_at_their_only_value_and_else_refused():
    """A saved recipe spells out every key."""
    for key, (value, way_out) in REMOVED.items():
        assert load_config(None, [f"{key}={value}"]) == load_config()
        refuse_mistyped_keys([f"{key}={value}"])
        assert explain(f"{key}=7") == f"{key} = 7: there is no such key any more; {way_out}."


def test_unknown_keys_are_refused_with_the_nearest_key():
    message = explain("learning.learning_rate=1")
    assert "learning.learning_rate: there is no such key" in message and "lr_schedule" in message
    assert "Did you mean 'rollout.temperature'?" in explain("rollout.temprature=1")
    assert "Did you mean 'rollout'?" in explain("rolout.temperature=1")
    assert "Did you mean 'rollout.max_running'?" in explain("learning.max_running=3"), (
        "right key, wrong section"
    )


def test_wrong_values_are_refused_with_what_is_allowed():
    assert (
        explain("run.device=gpu") == "run.device = 'gpu': must be one of auto, cpu, cuda. Did you mean 'cpu'?"
    )
    assert "rollout.temperature = -1" in explain("rollout.temperature=-1")
    assert "learning.lr = 'fast'" in explain("learning.lr=fast")
    assert "must divide rollout.prompts_per_step = 16" in explain("learning.minibatches=5")
    assert "between 1 and eval.samples = 2" in explain("eval.samples=2", "eval.pass_k=[4]")
    assert "section.key=value" in explain("learning.lr")
    assert "is a value, not a section" in explain("run.seed=1", "run.seed.x=2")


@pytest.mark.parametrize(
    "override",
    [
        "learning.lr=inf",
        "rollout.temperature=.nan",
        "rollout.graph_memory_gb=.inf",
        "rollout.sentinel.kl=.nan",
    ],
)
def test_numbers_that_are_not_finite_are_refused(override):
    assert "finite number" in explain(override) and explain(override).startswith(override.partition("=")[0])


LEARNS = "rollout.speculation.drafters=[eagle]", "rollout.speculation.online.share=0.02"
STREAMS = ("rollout.mode=partial",)


@pytest.mark.parametrize(
    "key, value, most, beside",
    [
        ("run.steps", 1 << 63, 1000000000, ()),
        ("policy.lora.rank", 1 << 63, 16384, ()),
        ("policy.lora.alpha", 1e39, 1000000.0, ("policy.lora.rank=2",)),
        ("task.train_problems", 1 << 63, 10000000, ()),
        ("task.eval_problems", 1 << 63, 10000000, ()),
        ("task.reward_memory_gb", 1e300, 100000.0, ()),
        ("rollout.samples_per_prompt", 1 << 63, 1000000, ()),
        ("rollout.prompts_per_step", 1 << 63, 1000000, ()),
        ("rollout.max_lag", 1 << 63, 1000, STREAMS),
        ("rollout.prompts_in_flight", 1 << 63, 10000000, (*STREAMS, "rollout.on_stale=drop")),
        ("rollout.kv_tokens", 1 << 63, 1000000000, ()),
        ("rollout.graph_memory_gb", 1e308, 100000.0, ()),
        ("rollout.speculation.online.lr", 1e39, 1e30, LEARNS),
        ("learning.lr", 1e39, 1e30, ()),
        ("learning.clip_high", 1e39, 1e9, ()),
        ("learning.epochs", 1 << 63, 1000000000, ()),
        ("learning.dynamic_sampling_rounds", 1 << 63, 1000000000, ()),
        ("eval.samples", 1 << 63, 1000000, ()),
        ("report.closing_pairs", 1 << 63, 1000, ()),
        ("cluster.heartbeat_seconds", 1e300, 1000000.0, ("cluster.replicas=2",)),
    ],
)
def test_values_beyond_their_bounds_are_refused(key, value, most, beside):
    """Such values ended in a traceback, or in a run that never began its first step."""
    message = explain(*beside, f"{key}={value!r}")
    assert message.startswith(f"{key} = {value!r}: ") and len(message.splitlines()) == 1
    assert f": must be at most {most:.15g}" in message
    load_config(None, [*beside, f"{key}={most!r}"])


def test_clip_high_of_a_million_is_accepted_as_no_clip():
    assert load_config(None, ["learning.clip_high=1e6"]).learning.clip_high == 1e6
    assert "1e6 or more clips no ratio in practice" in explain("learning.clip_high=1e39")


@pytest.mark.parametrize(
    "override",
    [
        "learning.lr=true",
        "run.seed=no",
        "run.steps=on",
        "rollout.kv_tokens=false",
        "eval.pass_k=[true]",
        "learning.correction.weight_bounds=[false, 2]",
    ],
)
def test_booleans_are_refused_as_numbers(override):
    key = override.partition("=")[0]
    message = explain("learning.correction.preset=tis", override)
    assert message.startswith(f"{key} = ") and "must be a number, and YAML reads true" in message


def test_booleans_are_accepted_by_boolean_keys():
    config = load_config(None, ["policy.activation_checkpointing=true", "rollout.deterministic=on"])
    assert config.policy.activation_checkpointing is True and config.rollout.deterministic is True


def test_online_learning_is_refused_with_the_reference_backend():
    """It was refused for want of a head, with advice to make one."""
    message = explain(*LEARNS, "rollout.backend=reference")
    assert "rollout.speculation.online.share = 0.02: rollout.backend = 'reference'" in message
    assert "use rollout.backend=native, or leave rollout.speculation.online out" in message


@pytest.mark.parametrize(
    "recipe, overrides, message",
    [
        (
            "default",
            "run.steps=5",
            r"overrides = 'run.steps=5': must be a list of texts; write \['run.steps=5'\]",
        ),
        ("default", [5], "overrides: 5 is a int; must be a list of texts"),
        ("default", {"run.steps": 5}, "overrides = {'run.steps': 5}: must be a list of texts"),
        ({"run": {"steps": 5}}, [], "recipe is a dict: must be the path of a YAML file.*parse_config"),
    ],
)
def test_load_config_refuses_arguments_of_the_wrong_type(recipe, overrides, message):
    with pytest.raises(TypeError, match=message):
        load_config(recipe, overrides)


def test_load_config_accepts_a_path(tmp_path):
    (tmp_path / "a.yaml").write_text("run: {steps: 5}")
    assert load_config(tmp_path / "a.yaml", ("run.seed=1",)).run.steps == 5
    with pytest.raises(ConfigError, match="neither a file nor a shipped recipe"):
        load_config(tmp_path / "b.yaml")


def test_weight_bounds_may_be_infinite():
    settings = "mode=decoupled", "weight=token", "weight_bounds=[0, .inf]"
    config = load_config(None, [f"learning.correction.{setting}" for setting in settings])
    assert (
        config.learning.correction.weight_bounds == (0.0, float("inf"))
        and parse_config(yaml.safe_load(dump_config(config))) == config
    )
    assert "weight_bounds = [0.0, nan]" in explain(
        *(f"learning.correction.{setting}" for setting in (*settings[:2], "weight_bounds=[0, .nan]"))
    )


def test_values_of_the_wrong_kind_are_refused_with_how_to_write_them():
    assert "must be a list; write [eagle]" in explain("rollout.speculation.drafters=eagle")
    assert "is a section, with the keys preset, " in explain("learning.correction=tis")
    assert "'rollout.speculation.drafters=[history' is not readable YAML: write lists as [a, b]" in explain(
        "rollout.speculation.drafters=[history"
    )
    assert "run.threads = 100000" in explain("run.threads=100000") and "65536" in explain(
        "rollout.max_running=100000000"
    )


@pytest.mark.parametrize(
    "text",
    ["2026-11-18", "2026-13-45", "1", "on", "1e3", "1_000", "0x1F", "12:30:45", ".inf", "true", "nan", "abc"],
)
def test_text_keys_take_values_as_written(text, tmp_path):
    """YAML makes dates, numbers and truth values of these, which no text key takes."""
    for given in (text, f'"{text}"', f"'{text}'"):
        config = load_config(None, [f"run.name={given}", f"task.data.path={given}", "task.name=file", FILE])
        assert (config.run.name, config.task.data.path) == (text, text)
    (tmp_path / "saved.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "saved.yaml")) == config


def test_override_values_of_other_keys_are_read_as_yaml():
    assert load_config(None, ["run.name="]).run.name == ""
    assert load_config(None, ["run.name='# 5'"]).run.name == "# 5"
    options = load_config("countdown-small", ["task.options.max_number=9"]).task.options
    assert options["max_number"] == 9
    for value, read in (("null", "None"), ("# 5", "None"), ("[a]", "['a']")):
        assert explain(f"run.name={value}") == f"run.name = {read}: must be text; write it in quotes."
    assert "run.name: must be text; write it in quotes" in explain("run.name={a: b}")


def test_nonexistent_date_is_a_config_error(tmp_path):
    assert "override 'run.seed=2026-13-45' is not readable YAML" in explain("run.seed=2026-13-45")
    (tmp_path / "x.yaml").write_text("run: {name: 2026-13-45}")
    with pytest.raises(ConfigError, match="x.yaml is not readable YAML: month must be in 1..12"):
        load_config(str(tmp_path / "x.yaml"))


@pytest.mark.parametrize("given", ["exact", "my_rewards.py:brief", "a:b, c"])
def test_error_for_a_list_of_sections_gives_working_advice(given):
    """The advice was [exact], which was refused in turn, as a section without a way out."""
    alone, entry = explain(f"task.rewards={given}"), explain(f"task.rewards=['{given}']")
    assert alone.startswith(f"task.rewards = '{given}': must be a list; write [{{function: ")
    assert entry.startswith(f"task.rewards.0 = '{given}': is a section; write {{function: ")
    assert "its keys are function, weight" in entry
    for advice in (alone.split("write ")[1].rstrip("."), f"[{entry.split('write ')[1].split(';')[0]}]"):
        assert [reward.function for reward in load_config(None, [f"task.rewards={advice}"]).task.rewards] == [
            given
        ]


def test_recipe_with_removed_policy_widen_opens_unless_it_was_set(tmp_path):
    saved = dump_config(load_config("default"))
    (tmp_path / "saved.yaml").write_text(saved.replace("policy:\n", "policy:\n  widen: ''\n"))
    assert load_config(str(tmp_path / "saved.yaml")) == load_config("default")
    message = explain("policy.widen=8b")
    assert (
        message.startswith("policy.widen = '8b': ")
        and "`python benchmarks/widen.py POLICY OUT --to 8b" in message
    )


def test_mistakes_are_reported_together():
    message = explain("run.device=gpu", "learning.lrr=1")
    assert "run.device" in message and "learning.lrr" in message


def test_overrides_win_over_the_recipe(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("learning: {lr: 1.0e-5, kl_coef: 0.1}\nrun: {steps: 3}\n")
    config = load_config(str(recipe), ["learning.lr=2e-6", "eval.samples=4", "eval.pass_k=[1,4]"])
    assert (config.learning.lr, config.learning.kl_coef, config.run.steps, config.eval.pass_k) == (
        2e-6,
        0.1,
        3,
        [1, 4],
    )


@pytest.fixture
def spelt_out(tmp_path):
    """A recipe with every key in it, as `paceline recipes NAME` prints it and a run saves it."""

    def write(*overrides: str, recipe: str | None = "default") -> str:
        path = tmp_path / "spelt_out.yaml"
        path.write_text(dump_config(load_config(recipe, overrides)))
        return str(path)

    return write


@pytest.mark.parametrize("algorithm", ALGORITHM_DEFAULTS)
def test_algorithm_override_replaces_the_files_algorithm_keys(algorithm, spelt_out):
    """The file's clip would otherwise be that of the algorithm it was written for."""
    override = f"learning.algorithm={algorithm}"
    assert load_config(spelt_out(), [override]) == load_config("default", [override])
    assert load_config(
        spelt_out("learning.algorithm=gspo", "learning.clip_high=0.5"), [override]
    ) == load_config("default", [override])
    beside = ["learning.clip_high=0.33", override]
    assert load_config(spelt_out("learning.lr=0.5"), beside).learning.clip_high == 0.33, (
        "beside it a key wins, whatever their order"
    )
    assert load_config(spelt_out("learning.lr=0.5"), beside).learning.lr == 0.5, (
        "not one of the algorithm's keys"
    )
    assert (
        load_config(spelt_out("learning.correction.preset=tis"), [override]).learning.correction.weight
        == "token"
    )


@pytest.mark.parametrize("preset", CORRECTION_PRESETS)
def test_preset_override_replaces_the_files_correction_keys(preset, spelt_out):
    override = f"learning.correction.preset={preset}"
    expected = load_config("default", [override])
    for before in (
        [],
        [
            "learning.correction.preset=icepop",
            "learning.correction.normalise=true",
            "learning.correction.veto=1e-4",
        ],
    ):
        assert load_config(spelt_out(*before), [override]) == expected
    beside = load_config(spelt_out(), ["learning.correction.veto=0.5", override]).learning.correction
    assert beside == expected.learning.correction.model_copy(update={"veto": 0.5})


def test_choice_override_applies_to_a_file_without_its_section(tmp_path):
    (tmp_path / "short.yaml").write_text("learning: {correction: }\n")
    with pytest.raises(ConfigError, match="is a value, not a section"):
        load_config(str(tmp_path / "short.yaml"), ["learning.correction.preset=tis"])
    (tmp_path / "short.yaml").write_text("run: {steps: 3}\n")
    assert (
        load_config(str(tmp_path / "short.yaml"), ["learning.algorithm=gspo"]).learning.loss_mean
        == "sequence"
    )


def test_keys_within_a_file_win_over_a_choice_and_are_noted(tmp_path, spelt_out):
    """Someone prints a recipe and changes one word of it."""
    path = tmp_path / "edited.yaml"
    path.write_text(Path(spelt_out()).read_text().replace("algorithm: grpo", "algorithm: gspo"))
    learning = load_config(str(path)).learning
    assert (learning.clip_low, learning.clip_high, learning.loss_mean) == (0.2, 0.2, "token")
    (note,) = learning_notes(learning)
    assert note == (
        "learning.algorithm = 'gspo': the recipe itself says clip_low = 0.2 instead of 0.0003, "
        "clip_high = 0.2 instead of 0.0004, "
        "loss_mean = token instead of sequence; leave these keys out to have the algorithm's own"
    )
    path.write_text(Path(spelt_out()).read_text().replace("preset: none", "preset: seq-mis"))
    with pytest.raises(
        ConfigError, match="preset = 'seq-mis' is undone by weight = 'none', reject = 'none' beside it"
    ):
        load_config(str(path))
    changed = load_config(
        None, ["learning.correction.preset=tis", "learning.correction.weight_bounds=[0, 5]"]
    ).learning
    assert "weight_bounds = [0.0, 5.0] instead of [0.0, 2.0]" in learning_notes(changed)[0]
    for name in shipped_recipes():
        assert not learning_notes(load_config(name).learning) and not rollout_notes(load_config(name).rollout)


def test_load_config_refuses_bad_files(tmp_path):
    with pytest.raises(ConfigError, match="neither a file nor a shipped recipe.*Did you mean 'default'"):
        load_config("defualt")
    (tmp_path / "bad.yaml").write_text("run: [unclosed")
    with pytest.raises(ConfigError, match="not readable YAML"):
        load_config(str(tmp_path / "bad.yaml"))
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="must hold sections"):
        load_config(str(tmp_path / "list.yaml"))


def test_dump_config_and_load_config_round_trip(tmp_path):
    config = load_config(None, ["learning.lr=3e-7", "eval.samples=2", "eval.pass_k=[2]"])
    (tmp_path / "c.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "c.yaml")) == config


def test_precision_brings_its_correction():
    """FP8 is corrected for, unless the recipe says how, or the learner is exact."""

    def preset(*overrides: str) -> str:
        return load_config(None, list(overrides)).learning.correction.preset

    for precision in ("fp8", "kv", "fp8+kv"):
        assert preset(f"rollout.precision={precision}") == "token-tis"
    assert preset() == "none"
    assert preset("rollout.precision=kv", "learning.numerics=exact") == "none"
    assert preset("rollout.precision=kv", "learning.correction.preset=none") == "none"
    assert preset("rollout.precision=kv", "learning.correction.preset=icepop") == "icepop"
    vetoed = load_config(None, ["rollout.precision=kv", "learning.correction.veto=1e-4"]).learning.correction
    assert (vetoed.preset, vetoed.weight, vetoed.veto) == ("token-tis", "token", 1e-4)
    shown = CliRunner().invoke(app, ["recipes", "default", "rollout.precision=kv"]).output
    assert "preset: token-tis" in shown


@pytest.mark.parametrize("apart", [["cluster.replicas=2"], ["rollout.mode=async"]])
def test_evaluations_in_base_precision_need_generation_in_the_runs_process(apart):
    overrides = ["rollout.precision=fp8", "eval.precision=base", *apart]
    with pytest.raises(ConfigError, match="eval.precision = 'base'.*use eval.precision=rollout"):
        load_config(None, overrides)


@pytest.mark.parametrize("recipe", shipped_recipes())
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["rollout.backend=reference"],
        ["rollout.precision=kv"],
        [
            "rollout.precision=fp8+kv",
            "rollout.base_precision_layers=1",
            "rollout.kv_scales=head",
            "learning.correction.preset=icepop",
        ],
        ["learning.correction.preset=geo-rs", "learning.correction.reject=token", "learning.algorithm=dapo"],
        [
            "rollout.speculation.drafters=[eagle, draft_model]",
            "rollout.speculation.eagle_path=a",
            "rollout.speculation.draft_model_path=b",
        ],
    ],
)
def test_dump_config_of_a_run_loads_again(recipe, overrides, spelt_out):
    """A key that does not apply stands there with its default, and that must not be a mistake."""
    assert load_config(spelt_out(*overrides, recipe=recipe)) == load_config(recipe, overrides)


@pytest.mark.parametrize(
    "overrides, key, remedy",
    [
        (["rollout.kv_scales=head"], "rollout.kv_scales = 'head'", "only to fp8+kv, kv"),
        (
            ["rollout.kv_scales=head", "rollout.precision=fp8"],
            "rollout.kv_scales = 'head'",
            "rollout.kv_scales=layer",
        ),
        (
            ["rollout.base_precision_layers=3"],
            "rollout.base_precision_layers = 3",
            "rollout.base_precision_layers=0",
        ),
        (
            ["rollout.speculation.eagle_path=x", "rollout.speculation.drafters=[history]"],
            "eagle_path = 'x'",
            "rollout.speculation.eagle_path=auto",
        ),
        (
            ["rollout.speculation.draft_model_path=x"],
            "draft_model_path = 'x'",
            "(rollout.speculation.draft_model_path=)",
        ),
        (
            ["rollout.speculation.verify=rejection"],
            "rollout.speculation.verify = 'rejection'",
            "rollout.speculation.verify=shared-noise",
        ),
        (["policy.lora.path=adapters"], "policy.lora.path = 'adapters'", "Set a rank, or leave it out"),
        (["policy.lora.alpha=8"], "policy.lora.alpha = 8.0", "(policy.lora.alpha=32.0)"),
        (["task.turns.stop=[x]"], "task.turns.stop = ['x']", "Name a tool, or leave it out"),
        (["task.turns.time_limit=3"], "task.turns.time_limit = 3.0", "(task.turns.time_limit=10.0)"),
        (
            ["task.data.held_out_path=x", "task.data.held_out_share=0.2"],
            "task.data.held_out_share = 0.2",
            "task.data.held_out_path = 'x'",
        ),
        (
            ["learning.correction.weight_bounds=[0, 3]"],
            "weight_bounds = [0.0, 3.0]",
            "set weight to one of token, sequence",
        ),
        (
            ["learning.correction.weight_outside=zero"],
            "weight_outside = 'zero'",
            "set weight to one of token, sequence",
        ),
        (
            ["learning.correction.reject_bounds=[0, 3]"],
            "reject_bounds = [0.0, 3.0]",
            "set reject to one of token, sequence, geometric, k3",
        ),
        (
            ["learning.correction.preset=tis", "learning.correction.reject_bounds=[0, 3]"],
            "reject_bounds = [0.0, 3.0]",
            "set reject to one of",
        ),
        (["task.data.path=x"], "task.data.path = 'x'", "only to file; change that, or leave it out"),
        (["task.data.answer_column=y"], "task.data.answer_column = 'y'", "(task.data.answer_column=)"),
        (["task.dataset=chain_sum"], "task.dataset = 'chain_sum'", "(task.dataset=)"),
        (["task.options={a: 1}"], "task.options = {'a': 1}", "only to countdown, reasoning-gym"),
    ],
)
def test_keys_that_would_be_ignored_are_refused(overrides, key, remedy):
    message = explain(*overrides)
    assert key in message and "does not apply" in message and remedy in message, message
    assert len(message.splitlines()) == 1


def test_refusal_names_a_way_out_that_works(spelt_out):
    recipe = spelt_out(
        "rollout.speculation.drafters=[draft_model]", "rollout.speculation.draft_model_path=x", recipe=None
    )
    out = ["rollout.speculation.drafters=[history]", "rollout.speculation.draft_model_path="]
    assert load_config(recipe, out).rollout.speculation.draft_model_path == ""


def test_rollout_notes_name_drafters_that_the_reference_ignores():
    rollout = load_config("default", ["rollout.backend=reference"]).rollout
    (note,) = rollout_notes(rollout)
    assert (
        "rollout.speculation.drafters = ['eagle', 'history']: not used" in note
        and "rollout.backend=native" in note
    )
    assert not rollout_notes(load_config("chain-sum", ["rollout.backend=reference"]).rollout)


def test_changed_keys_returns_both_values():
    assert changed_keys(Config(), load_config(None, ["learning.lr=0.5"])) == {"learning.lr": (1e-6, 0.5)}


def test_shipped_recipes_are_valid():
    assert "default" in shipped_recipes()
    for name in shipped_recipes():
        load_config(name)


def test_backend_without_fp8_refuses_fp8():
    """Silently in base precision, the run's figures would be called FP8's."""
    with pytest.raises(ConfigError, match="precision = 'fp8[+]kv' needs backend: native"):
        load_config(None, ["rollout.backend=reference", "rollout.precision=fp8+kv"])
    assert load_config(None, ["rollout.backend=reference"]).rollout.precision == "base"


def test_admission_longest_needs_the_native_engine():
    with pytest.raises(ConfigError, match=r"rollout\.admission = 'longest'.*rollout\.admission=fifo"):
        load_config("default", ["rollout.admission=longest", "rollout.backend=reference"])
    assert load_config("default", ["rollout.admission=longest"]).rollout.admission == "longest"


def _undescribed(section: type[Section], prefix: str = "") -> list[str]:
    found = []
    for key, field in section.model_fields.items():
        kind = field.annotation
        kind = get_args(kind)[0] if get_origin(kind) is list else kind
        if isinstance(kind, type) and issubclass(kind, Section):
            found += _undescribed(kind, f"{prefix}{key}.")
        elif not field.description:
            found.append(f"{prefix}{key}")
    return found


def test_config_keys_all_have_a_description():
    assert _undescribed(Config) == []


@pytest.mark.parametrize("recipe", ["default", "countdown-small", "chain-sum", "calculator", "products"])
def test_task_name_override_drops_keys_of_the_recipes_own_task(recipe):
    """`task.name=file` was refused for train_problems, options and dataset, which the user had never set."""
    given = ["task.name=file", "task.data.path=x.jsonl", "task.rewards=[{function: last-number}]"]
    config = load_config(recipe, given)
    assert config.task.name == "file" and config.task.data.path == "x.jsonl"
    assert not config.task.options and not config.task.dataset
    with pytest.raises(ConfigError, match="task.train_problems = 7 does not apply to task.name = 'file'"):
        load_config(recipe, [*given, "task.train_problems=7"])
    with pytest.raises(ConfigError, match="task.options = {'a': 1} does not apply to task.name = 'file'"):
        load_config(recipe, [*given, "task.options={a: 1}"])


def test_task_name_override_keeps_keys_that_apply():
    countdown = load_config("chain-sum", ["task.name=countdown"]).task
    assert not countdown.options, "reasoning-gym's mean something else"
    assert countdown.train_problems == 128 and not countdown.dataset
    # the recipe's own task, said again
    assert load_config("countdown-small", ["task.name=countdown"]) == load_config("countdown-small")
    assert load_config("default", ["task.name=running-sums"]) == load_config("default")
    assert load_config("gsm8k", ["task.name=file"]) == load_config("gsm8k")


@pytest.mark.parametrize(
    "overrides, learns",
    [
        ((), True),
        (("rollout.mode=partial",), True),
        (("rollout.mode=partial", "rollout.speculation.pacing=fixed"), False),
        (("rollout.mode=oversample", "rollout.speculation.pacing=fixed"), False),
        (("rollout.speculation.verify=rejection", "rollout.speculation.pacing=fixed"), False),
        (
            (
                "rollout.mode=partial",
                "rollout.speculation.pacing=fixed",
                "rollout.speculation.online.share=0.02",
            ),
            True,
        ),
        (
            (
                "rollout.speculation.verify=rejection",
                "rollout.speculation.pacing=fixed",
                "rollout.speculation.eagle_path=fresh",
            ),
            True,
        ),
        (("rollout.speculation.online.share=0",), False),
        (("rollout.speculation.drafters=[history]",), False),
    ],
)
def test_head_may_learn_is_off_where_timing_would_decide_over_tokens(overrides, learns):
    """A run that could be repeated can still be: how much a head learns depends on measured times."""
    config = load_config(None, ["rollout.speculation.drafters=[eagle]", *overrides])
    assert config.rollout.head_may_learn == learns


@pytest.mark.parametrize(
    "text, key",
    [("learning: {lr: 1e-4}\nlearning: {clip_low: 0.1}", "learning"), ("run:\n  seed: 1\n  seed: 2", "seed")],
)
def test_repeated_key_is_refused_with_both_lines(tmp_path, text, key):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"'{key}' stands in line \d and again in line \d"):
        load_config(tmp_path / "recipe.yaml")


def test_held_out_file_that_is_trained_on_is_refused():
    data = ["task.name=file", FILE, "task.data.path=rows.jsonl", "task.data.held_out_path=rows.jsonl"]
    with pytest.raises(ConfigError, match="is task.data.path.*leave it out"):
        load_config(None, data)
    assert load_config(None, data[:3]).task.data.held_out_path == ""


def test_eval_max_tokens_defaults_to_rollout_max_tokens():
    assert load_config(None, ["rollout.max_tokens=32"]).eval.max_tokens == 32
    assert load_config(None, ["rollout.max_tokens=32", "eval.max_tokens=64"]).eval.max_tokens == 64
    assert (
        parse_config(
            yaml.safe_load(dump_config(load_config(None, ["rollout.max_tokens=32"])))
        ).eval.max_tokens
        == 32
    )


@pytest.mark.parametrize("section", ["rollout", "eval"])
@pytest.mark.parametrize("value", ["1e-45", "1e-38", "9e-6", "-1"])
def test_temperature_below_the_least_is_refused(section, value):
    with pytest.raises(ConfigError, match=rf"{section}.temperature = .*must be 0 .* or at least 1e-05"):
        load_config(None, [f"{section}.temperature={value}"])
    for allowed in (0, 1e-5, 2):
        assert (
            getattr(load_config(None, [f"{section}.temperature={allowed}"]), section).temperature == allowed
        )
