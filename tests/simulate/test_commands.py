"""`paceline simulate` as a person uses it."""

import json
import re

import pytest
from typer.testing import CliRunner

from paceline.bench import lengths as bench_lengths
from paceline.cli.main import app
from paceline.config import Config
from paceline.simulate.calibrate import profile_from
from paceline.simulate.hardware import load_hardware, shipped_profiles
from paceline.simulate.model_shape import from_huggingface, load_model
from paceline.simulate.points import Measurements, load_measurements
from paceline.simulate.questions import Sweep, build, flags_from_recipe
from paceline.simulate.workload import Lengths
from tests.page_data import page_data

SMALL = ["--gpus=2", "--prompts=4", "--samples=4", "--lengths=lognormal:200,0.8,4,1000", "--max-running=16"]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_flags_give_text_json_and_a_page(tmp_path):
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    said = invoke(*SMALL, "-k", "paced:3", "--train-drafter", *files)
    for words in ("measured", "assumed", "rollout", "training the drafter wants"):
        assert words in said
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["rollout_speedup"] > 1 and record["this"]["tokens"] == record["plain"]["tokens"]
    sources = {part["source"] for part in record["this"]["provenance"].values()}
    assert sources == {"measured", "fitted", "assumed"}
    (section,) = page_data((tmp_path / "a.html").read_text())["sections"]
    assert [chart["title"] for chart in section["charts"]] == [
        "Requests running",
        "Draft tokens per step, mean over rows",
    ]
    assert "who says so" in section["text"] and max(filter(None, section["charts"][0]["series"][1]["y"])) > 0


def test_a_sweep_takes_several_words(tmp_path):
    said = invoke(*SMALL, "--sweep", "k=0,3", "gpus=1,2", "--html", str(tmp_path / "s.html"))
    rows = [line.split() for line in said.splitlines() if re.match(r"\s+[03]\s+[12]\s", line)]
    assert [row[:2] for row in rows] == [["0", "1"], ["0", "2"], ["3", "1"], ["3", "2"]]
    longer = invoke(*SMALL, "-k", "0", "--sweep", "mean_length=100,400").splitlines()
    assert float(longer[2].split()[1]) > float(longer[1].split()[1]) > 0
    assert rows[0][4] == "1.00" and float(rows[2][4]) > 1
    charts = 2 + 4 + 2  # two sweep charts, a tail each, drafts for k = 3
    sections = page_data((tmp_path / "s.html").read_text())["sections"]
    assert sum(len(section["charts"]) for section in sections) == charts


def test_a_recipe_is_a_starting_point():
    said = invoke("--recipe", "default", "--lengths", "fixed:20")
    assert "16 prompts x 8 samples" in said


def test_a_recipes_precision_engine_and_devices_are_taken():
    vllm = {"tensor_parallel": 4, "engine": {"quantization": "fp8"}}
    speculation = {"drafters": ["ngram"], "verify": "rejection", "pacing": "fixed"}
    rollout = {"backend": "vllm", "vllm": vllm, "speculation": speculation}
    flags = flags_from_recipe(Config.model_validate({"rollout": rollout}))
    assert (flags.engine, flags.gpus, flags.tp, flags.drafter) == ("vllm", 4, 4, "history")
    assert (flags.weights, flags.kv) == ("fp8", "bf16")
    flags = flags_from_recipe(Config.model_validate({"rollout": {"precision": "kv"}}))
    assert (flags.weights, flags.kv) == ("bf16", "fp8")
    cluster = {"replicas": 8, "learners": 8, "placement": "colocated"}
    flags = flags_from_recipe(Config.model_validate({"cluster": cluster}))
    assert (flags.engine, flags.gpus, flags.tp, flags.weights) == ("paceline", 8, 1, "bf16")


def test_another_mode_than_the_recipes_has_its_own_lag():
    flags = flags_from_recipe(Config.model_validate({"rollout": {"mode": "async", "max_lag": 3}}))
    assert build(flags).schedule.lag == 3
    assert build(flags.changed({"mode": "sync"})).schedule.lag == 0
    assert Sweep.parse(["mode=one-step-off"]).apply(flags, ("one-step-off",)).lag is None
    assert flags.changed({"mode": "partial", "lag": 2}).lag == 2


def test_a_large_model_scales_with_its_tp():
    said = invoke("scale", "--model=qwen3-235b-a22b", "--tp=8", "--lengths=fixed:20", "--gpus=8,16")
    assert [line.split()[:2] for line in said.splitlines()[1:3]] == [["8", "1"], ["16", "2"]]


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"gemms": [', "not readable JSON"),
        ('{"gemms": []}', "'device', 'software', and 'date'"),
        ('{"device": "CPU", "software": "", "date": "", "gemms": [{"rows": 1}]}', "'weights' and 'seconds'"),
        (
            '{"device": "CPU", "software": "", "date": "", "gemms": [{"rows": 1, "seconds": 0}]}',
            "seconds = 0",
        ),
    ],
)
def test_damaged_points_are_named(tmp_path, content, message):
    file = tmp_path / "points.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}.*{re.escape(message)}"):
        load_measurements(file)


@pytest.mark.parametrize("device", ["CPU", "NVIDIA H200"])
def test_a_profile_from_nothing_says_what_it_needs(device):
    with pytest.raises(ValueError, match="no point of gemms in bf16"):
        profile_from("empty", Measurements(device, "", ""))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["scale", "--gpus", "8,many"], "--gpus '8,many': use numbers"),
        (["--sweep", "k=0", "k=3"], "k is swept already"),
        (["--hardware", "h300"], "neither a shipped profile"),
        (["--model", "nothing"], "neither a built-in shape"),
        (["--sweep", "colour=red"], "KEY of model"),
        (["--lengths", "fixed:9", "--sweep", "mean_length=5,6"], "needs log-normal lengths"),
        (["--lengths", "long"], "lognormal:MEAN,SIGMA,MIN,MAX"),
        (["--accept", "5@3"], "between 1 and 4"),
        (["-k", "many"], "paced:MAX"),
        (["--mode", "later"], "sync, one-step-off, partial, oversample, async"),
        (["--model", "qwen3-235b-a22b"], "raise --tp or --ep"),
        (["--tp", "3"], "must divide the 32 attention heads"),
        (["--hardware", "a100", "--weights", "fp8"], "has no FP8"),
        (["--lag", "2"], "--mode sync has none"),
        (["--gpus", "0"], "--gpus 0: must be at least 1"),
        (["--tp", "0"], "--tp 0: must be at least 1"),
        (["--prompts", "0"], "--prompts 0: must be at least 1"),
        (["--samples", "-1"], "--samples -1: must be at least 1"),
        (["--prompt-tokens", "-5"], "--prompt-tokens -5: must be at least 0"),
        (["--reward-seconds", "-10"], "--reward-seconds -10.0: must be at least 0"),
        (["--reward-seconds", "nan"], "--reward-seconds nan: must be at least 0"),
        (["--steps", "-2"], "--steps -2: must be at least 0"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
        (["--spec-max-running", "-2"], "--spec-max-running -2: must be at least 0"),
        (["--mode", "async", "--lag", "-5"], "--lag -5: must be at least 0"),
        (["--mode", "async", "--train-share", "nan"], "--train-share nan: must be between 0 and 1"),
        (["--mode", "async", "--train-share", "-1"], "--train-share -1.0: must be between 0 and 1"),
        (["--kv-tokens", "-4"], "--kv-tokens -4: must be at least 0"),
        (["--kv-tokens", "100"], "raise --kv-tokens"),
        (["--kv-tokens", "100000000000"], "fit beside the weights"),
        (["-k", "paced:-1"], "paced:MAX"),
        (["-k", "100000"], "from 0 to 1024"),
        (["--lengths", "lognormal:100,1,1,inf"], "lognormal:MEAN,SIGMA,MIN,MAX"),
        (["--lengths", "lognormal:100,1e200,1,200"], "lognormal:MEAN,SIGMA,MIN,MAX"),
        (["from", "nowhere", "--hardware", "h200"], "is not a run directory"),
    ],
)
def test_errors_name_the_way_out(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)


def test_slots_that_are_never_taken_cost_nothing():
    first = invoke(*SMALL, "-k", "3")
    assert invoke(*SMALL, "-k", "3", "--max-running", "1000000000000") == first


def test_every_shipped_profile_loads_and_says_where_it_comes_from():
    assert set(shipped_profiles()) == {"h200", "h100", "a100", "b200", "gb200"}
    parts = {"gemm_bf16", "attention", "other", "experts", "links", "training", "data_sheet"}
    for name in shipped_profiles():
        hardware = load_hardware(name)
        assert set(hardware.provenance) >= parts
        assert name == "h200" or hardware.provenance["gemm_bf16"].source == "assumed"
    faster, slower = (load_hardware(name).kernels.gemm_bf16 for name in ("b200", "h200"))
    assert faster.bandwidth > slower.bandwidth


@pytest.mark.parametrize(
    "name, total, active",
    [
        ("qwen3-8b", 8.2e9, 7.6e9),
        ("qwen2.5-7b", 7.6e9, 7.1e9),
        ("qwen2.5-32b", 32.8e9, 32.0e9),
        ("llama-3.3-70b", 70.6e9, 69.5e9),
        ("qwen3-30b-a3b", 30.5e9, 3.0e9),
        ("qwen3-235b-a22b", 235e9, 21.5e9),
    ],
)
def test_built_in_models_have_their_published_sizes(name, total, active):
    model = load_model(name)
    assert model.matrix_parameters == pytest.approx(total, rel=0.02)
    assert model.active_parameters == pytest.approx(active, rel=0.05)


def test_config_json_of_models_the_engine_does_not_know():
    mixtral = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    model = from_huggingface("mixtral", mixtral)
    assert model.matrix_parameters == pytest.approx(46.7e9, rel=0.01)
    assert model.active_parameters == pytest.approx(12.8e9, rel=0.02)
    assert from_huggingface("wrapped", {"text_config": mixtral}).matrix_parameters == model.matrix_parameters
    with pytest.raises(ValueError, match="kv_lora_rank"):
        from_huggingface("mla", mixtral | {"kv_lora_rank": 512})
    with pytest.raises(ValueError, match="vocab_size"):
        from_huggingface("cut", {key: value for key, value in mixtral.items() if key != "vocab_size"})


def test_config_json_with_shared_experts_and_dense_first_layers():
    """Read as DeepSeek and Qwen2-MoE spell them, which the policy's reader does not know."""
    deepseek = {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "vocab_size": 102400,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    }
    model = from_huggingface("deepseek-moe-16b", deepseek)
    assert (model.num_expert_layers, model.shared_intermediate_size) == (27, 2816)
    assert (model.num_kv_heads, model.head_dim) == (16, 128)
    assert model.matrix_parameters == pytest.approx(16.4e9, rel=0.01)
    assert model.active_parameters == pytest.approx(2.6e9, rel=0.02)
    every_second = from_huggingface("sparse-step", deepseek | {"decoder_sparse_step": 2})
    assert every_second.num_expert_layers == 14
    qwen = {"shared_expert_intermediate_size": 5632, "n_shared_experts": 0}
    assert from_huggingface("qwen2-moe", deepseek | qwen).shared_intermediate_size == 5632


def test_lengths_are_those_of_bench():
    """The simulator compares itself with `paceline bench rollout`, so both draw the same lengths."""
    text = "lognormal:512,1.0,16,4096"
    assert Lengths.parse(text).bench_values(50) == bench_lengths.Lengths.parse(text, 50).values
    fixed = Lengths.parse("fixed:49")
    assert fixed.bench_values(3) == (49,) * 3 and set(fixed.draw(100, seed=1)) == {49}
    drawn = Lengths.parse(text).draw(20000, seed=0)
    assert drawn.min() >= 16 and drawn.max() <= 4096
    assert drawn.mean() == pytest.approx(512, rel=0.05)


DENSE = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "intermediate_size": 14336,
}
SPARSE = DENSE | {"num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "config, message",
    [
        (SPARSE | {"num_local_experts": "many"}, "num_local_experts = 'many': must be a whole number"),
        (SPARSE | {"num_local_experts": [8]}, "num_local_experts = [8]: must be a whole number"),
        (SPARSE | {"decoder_sparse_step": "2"}, "decoder_sparse_step = '2': must be a whole number"),
        (SPARSE | {"mlp_only_layers": 3}, "mlp_only_layers = 3: must be a list"),
        (SPARSE | {"first_k_dense_replace": "1"}, "first_k_dense_replace = '1': must be a whole number"),
        (SPARSE | {"n_shared_experts": -2}, "n_shared_experts = -2: must be a whole number"),
        (DENSE | {"intermediate_size": None}, "has no intermediate_size"),
        (DENSE | {"hidden_size": "wide"}, "hidden_size = 'wide': must be a whole number"),
        (DENSE | {"layer_types": ["linear_attention"] * 32}, "linear_attention: only full_attention"),
        ({"text_config": [1]}, "text_config = [1]: must be an object"),
    ],
)
def test_a_config_json_that_makes_no_sense_is_named_with_its_key(tmp_path, config, message):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}.*{re.escape(message)}"):
        load_model(str(tmp_path))


def test_keys_that_are_null_are_keys_that_are_missing():
    nothing = dict.fromkeys(("n_shared_experts", "head_dim", "first_k_dense_replace", "sliding_window"))
    assert from_huggingface("moe", SPARSE | nothing) == from_huggingface("moe", SPARSE)


def test_a_sliding_window_is_said_to_be_an_upper_bound(tmp_path):
    window = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16}
    (tmp_path / "config.json").write_text(json.dumps(DENSE | window))
    flags = ["--model", str(tmp_path), "-k", "0", "--gpus=2", "--prompts=2", "--samples=2"]
    assert "window: layers that see 512 tokens" in invoke(*flags, "--lengths=fixed:1000")
    assert "window:" not in invoke(*flags, "--lengths=fixed:100")
    assert from_huggingface("qwen2", DENSE | {"sliding_window": 512, "use_sliding_window": False}).window == 0


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("kernels", "gemm_bf16", "bandwidth"), "fast", "gemm_bf16.bandwidth = 'fast': must be a number"),
        (("kernels", "gemm_bf16", "bandwidth"), 0, "gemm_bf16.bandwidth = 0: must be a number above 0"),
        (("kernels", "gemm_bf16", "launch_seconds"), -1, "must be a number 0 or more"),
        (("kernels", "gemm_bf16", "sharpness"), 0.5, "gemm_bf16.sharpness = 0.5: must be at least 1"),
        (("data_sheet", "memory_bytes"), None, "data_sheet.memory_bytes = None"),
        (("training", "utilisation"), 2, "training.utilisation = 2: a share"),
        (("links", "domain"), "8", "links.domain = '8'"),
        (("provenance",), {}, "provenance does not say where gemm_bf16 comes from"),
        (("provenance", "links", "source"), "guess", "'guess' is not a valid Source"),
        (("scaled_from",), "{file}", "leads back to where it began"),
    ],
)
def test_a_damaged_profile_is_named_with_its_key(tmp_path, path, value, message):
    file = tmp_path / "machine.json"
    record = json.loads(shipped_profiles()["h200"].read_text())
    node = record
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = str(file) if value == "{file}" else value
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}.*{re.escape(message)}"):
        load_hardware(str(file))


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_profile_that_is_no_json_object_is_named(tmp_path, content):
    file = tmp_path / "machine.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(file))} is not a hardware profile"):
        load_hardware(str(file))
