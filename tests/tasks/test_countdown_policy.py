"""The shipped Countdown policy goes with its recipe."""

from paceline.config import load_config
from paceline.models.source import policy_folder
from paceline.policy.config import read_config
from paceline.policy.tokenizer import load_tokenizer
from paceline.sft.setup import FRESH_LAYERS, FRESH_POSITIONS
from paceline.tasks.make import task_alphabet


def test_countdown_policy_matches_its_recipe():
    config = load_config("countdown-small")
    folder = policy_folder(config.policy.path)
    shape = read_config(folder)
    assert shape.num_layers == FRESH_LAYERS and shape.max_positions == FRESH_POSITIONS
    assert set(task_alphabet(config.task)) < set(load_tokenizer(folder).get_vocab())
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3_000_000
