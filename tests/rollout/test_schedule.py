"""`schedule.jsonl` as a file: what is none, or of another recipe, is refused by name."""

import json
from types import SimpleNamespace

import pytest

from paceline.config import ConfigError, RolloutConfig
from paceline.rollout.schedule import ScheduledRollouts, cut_schedule
from paceline.rollout.stream import StreamingRollouts

GROUP = {"purpose": "train", "step": 1, "number": 0, "occurrence": 0, "position": 0, "born": 0}
LINE = {"step": 1, "handed_out": 1, "groups": [GROUP | {"samples": [[[0, 5]], []]}], "metrics": {}}
SAMPLER = SimpleNamespace(task=SimpleNamespace(turns=None), backend=None)


def scheduled(tmp_path, content: bytes, **keys: int) -> ScheduledRollouts:
    path = tmp_path / "schedule.jsonl"
    path.write_bytes(content)
    rollout = RolloutConfig(**{"mode": "async", "prompts_per_step": 1, "samples_per_prompt": 2} | keys)
    return ScheduledRollouts(SAMPLER, None, rollout, path)


def test_read_schedule_reads_a_line(tmp_path):
    source = scheduled(tmp_path, json.dumps(LINE).encode())
    assert source.courses == {"train/1/0/0": [(0, 5)], "train/1/0/1": []}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x7fELF\xb7", "it holds no step"),
        (b'{"step": 1, "kind": "train"}', "the line of step 1 is none of a schedule"),
        (b'{"step": 1, "groups": [{}], "metrics": {}}', "the line of step 1 is none of a schedule"),
        (b'{"step": 1, "groups": 3, "metrics": {}}', "the line of step 1 is none of a schedule"),
        (b'{"step": 1, "groups": [], "metrics": {}}', "has 0 groups"),
    ],
)
def test_read_schedule_refuses_other_files(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message):
        scheduled(tmp_path, content)


@pytest.mark.parametrize("key", ["prompts_per_step", "samples_per_prompt"])
def test_schedule_of_another_recipe_is_refused(tmp_path, key):
    with pytest.raises(ConfigError, match=f"rollout.{key} = 3"):
        scheduled(tmp_path, json.dumps(LINE).encode(), **{key: 3})


def test_resume_refuses_to_add_or_drop_a_schedule(tmp_path):
    repeated = scheduled(tmp_path, json.dumps(LINE).encode())
    live = StreamingRollouts(SAMPLER, None, RolloutConfig(mode="async"), 0, pytest.fail)
    with pytest.raises(ConfigError, match="the same --schedule FILE"):
        live.restore(repeated.state())
    state = json.dumps({"step": 1, "number": 0, "seen": {}, "carried": [], "groups": []})
    with pytest.raises(ConfigError, match="was not begun with a schedule"):
        repeated.restore(state)


def test_cut_schedule_survives_damaged_lines(tmp_path):
    path = tmp_path / "schedule.jsonl"
    path.write_bytes(json.dumps(LINE).encode() + b'\n\xff\xfe\n{"step": 2}\n{"st')
    cut_schedule(path, 1)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [LINE]
    assert [file.name for file in tmp_path.iterdir()] == ["schedule.jsonl"]
