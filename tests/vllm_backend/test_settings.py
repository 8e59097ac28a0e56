"""What a recipe may ask of vLLM, what its process is told, and which versions are known."""

import sys
from dataclasses import replace

import pytest
import torch

from paceline.certify.vllm import VllmOptions, vllm_config
from paceline.config import ConfigError, load_config
from paceline.models.source import BUILTIN_POLICY
from paceline.policy.config import read_config
from paceline.policy.decoder import Decoder
from paceline.session import open_session
from paceline.vllm_backend.adapter import engine_arguments, refuse_unknown, speculative_options
from paceline.vllm_backend.client import vllm_launch
from paceline.vllm_backend.settings import DraftSettings, VllmSettings
from paceline.vllm_backend.start import vllm_python, vllm_settings
from paceline.vllm_backend.versions import UnsupportedVersion, check_version, version_in
from tests.vllm_backend.test_backend import SETTINGS

POLICY = Decoder(read_config(BUILTIN_POLICY), torch.bfloat16, "meta")
VLLM = ["rollout.backend=vllm", "rollout.speculation.drafters=[]"]
EAGLE = [
    "rollout.backend=vllm",
    "rollout.speculation.drafters=[eagle]",
    "rollout.speculation.pacing=fixed",
    "rollout.speculation.verify=rejection",
]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([*EAGLE, "rollout.speculation.verify=shared-noise"], "verify=rejection"),
        ([*EAGLE, "rollout.speculation.pacing=adaptive"], "pacing=fixed"),
        ([*EAGLE, "rollout.speculation.drafters=[history]"], "ngram and suffix"),
        ([*VLLM, "rollout.mode=partial", "rollout.on_update=keep"], "on_update=recompute"),
        ([*VLLM, "rollout.router_replay=true"], "rollout.backend=native"),
        ([*VLLM, "rollout.precision=fp8"], "quantization: fp8"),
        ([*VLLM, "rollout.admission=longest"], "admission=fifo"),
        ([*VLLM, "rollout.deterministic=true"], "rollout.backend=native"),
        ([*VLLM, "learning.numerics=exact"], "rollout.backend=native"),
        ([*VLLM, "rollout.vllm.engine={dtype: float16}"], "use policy.dtype"),
        (
            [*VLLM, "rollout.vllm.engine={enable_sleep_mode: true}"],
            "enable_sleep_mode = True: vLLM sleeps by",
        ),
        ([*VLLM, "cluster.transport=broadcast"], "cluster.transport = 'broadcast' does not reach vLLM"),
        (
            [*VLLM, "cluster.transport=ipc", "rollout.vllm.tensor_parallel=2"],
            "hands weights to one rank, and vLLM has 2",
        ),
        ([*VLLM, "rollout.vllm.speculative={method: ngram}"], "rollout.speculation.drafters"),
        ([*VLLM, "rollout.vllm.speculative={prompt_lookup_max: 4}"], "prompt_lookup_max.*name a drafter"),
        (["rollout.vllm.tensor_parallel=2"], "use rollout.backend=vllm"),
        (["rollout.speculation.drafters=[ngram]"], "rollout.backend=vllm"),
    ],
)
def test_recipe_keys_that_vllm_lacks_are_refused_with_the_way_out(overrides, says):
    with pytest.raises(ConfigError, match=says.replace("{", ".").replace("[", ".")):
        load_config("default", overrides)


def test_engine_options_pass_through_except_those_relied_upon():
    config = load_config("default", [*VLLM, "rollout.vllm.engine.enforce_eager=true"])
    assert config.rollout.vllm.engine == {"enforce_eager": True}
    arguments = engine_arguments(SETTINGS)
    assert arguments["logprobs_mode"] == "processed_logprobs" and arguments["max_model_len"] == 64
    assert arguments["speculative_config"] == {"method": "eagle3", "num_speculative_tokens": 3}


def test_cache_of_a_given_size_asks_for_no_share_of_the_gpu():
    """vLLM refuses to start where less than its share is free, as beside a learner it is."""
    arguments = engine_arguments(replace(SETTINGS, kv_bytes=1 << 30))
    assert arguments["kv_cache_memory_bytes"] == 1 << 30 and arguments["gpu_memory_utilization"] < 0.1
    given = replace(SETTINGS, kv_bytes=1 << 30, engine={"gpu_memory_utilization": 0.5})
    assert engine_arguments(given)["gpu_memory_utilization"] == 0.5
    assert "gpu_memory_utilization" not in engine_arguments(SETTINGS)


@pytest.mark.parametrize(
    ("overrides", "sleeps"),
    [
        ([], True),
        (["rollout.mode=async"], False),
        (["rollout.vllm.engine={enable_sleep_mode: false}"], False),
    ],
)
def test_vllm_sleeps_beside_a_learner_unless_kept_awake(overrides, sleeps):
    config = load_config("default", [*VLLM, "rollout.kv_tokens=4096", *overrides])
    assert vllm_settings(POLICY, config, None).sleeps == sleeps


def test_fp8_cache_takes_half_the_bytes_for_as_many_tokens():
    sizes = [
        vllm_settings(POLICY, load_config("default", [*VLLM, "rollout.kv_tokens=4096", *more]), None).kv_bytes
        for more in ([], ["rollout.vllm.engine={kv_cache_dtype: fp8}"])
    ]
    assert sizes[0] == 2 * sizes[1] > 0


def test_speculation_stops_in_large_batches_if_the_recipe_sets_it():
    table = "num_speculative_tokens_per_batch_size"
    draft = DraftSettings("ngram", "ngram", 3, max_running=4)
    assert speculative_options(draft, 64)[table] == [(1, 4, 3), (5, 64, 0)]
    assert table not in speculative_options(draft, 4)
    assert table not in speculative_options(replace(draft, max_running=0), 64)


def test_unknown_engine_option_is_named():
    with pytest.raises(ValueError, match=r"engine.max_num_seq: vLLM 0.32.0 .* mean 'max_num_seqs'"):
        refuse_unknown(["max_num_seq"], ["dtype", "max_num_seqs"], "0.32.0")
    refuse_unknown(["dtype"], ["dtype"], "0.32.0")


def test_missing_environment_is_named():
    with pytest.raises(ConfigError, match=r"rollout.vllm.python = '/nowhere/python'.*scripts/vllm_env.sh"):
        open_session(load_config("default", [*VLLM, "rollout.vllm.python=/nowhere/python"]))


def test_settings_survive_dump_and_load():
    assert VllmSettings.load(SETTINGS.dump()) == SETTINGS


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.27.1+cpu"])
def test_known_versions_are_accepted(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.25.1", "0.33.0", "1.0.0", "dev"])
def test_unknown_version_is_named(version):
    with pytest.raises(UnsupportedVersion, match=f"vLLM {version}.*0.26 to 0.32"):
        check_version(version)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (f'exec {sys.executable} "$@"', "this Python has no vLLM"),
        ("echo broken >&2; exit 3", r"does not answer as a Python does \(exit code 3\) broken"),
        (None, "it cannot be run"),
        ("echo 0.25.1", "vLLM 0.25.1 is not supported"),
    ],
)
def test_environment_without_a_known_vllm_is_named(tmp_path, script, says):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o644 if script is None else 0o755)
    with pytest.raises(ConfigError, match=rf"rollout.vllm.python = .*{says}.*scripts/vllm_env.sh"):
        vllm_python(str(python))


@pytest.mark.parametrize(("said", "version"), [("0.32.0", "0.32.0"), ("unknown", "")])
def test_version_in_reads_the_environments_vllm(tmp_path, said, version):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {said}\n")
    python.chmod(0o755)
    assert vllm_python(str(python)) == python and version_in(str(python)) == version


def test_certificate_without_a_drafter_leaves_out_the_recipes_drafters(tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        "rollout: {backend: vllm, vllm: {speculative: {prompt_lookup_max: 2}}, "
        "speculation: {drafters: [ngram], verify: rejection, pacing: fixed}}"
    )
    options = VllmOptions("builtin", "ngram", 3)
    plain, speculating = (vllm_config(options, str(recipe), [], speculates) for speculates in (False, True))
    assert plain.rollout.vllm.speculative == {} and not plain.rollout.speculation.drafters
    assert speculating.rollout.vllm.speculative == {"prompt_lookup_max": 2}


def test_vllm_process_inherits_nothing_of_this_environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    launch = vllm_launch(SETTINGS, "/venv/bin/python")
    assert not {"PYTHONPATH", "PYTORCH_CUDA_ALLOC_CONF"} & set(launch.environment)
    assert launch.environment["VLLM_LOGGING_LEVEL"] == "INFO" and launch.command[0] == "/venv/bin/python"
