"""What a session refuses to open, and in which words."""

import pytest

from paceline.config import ConfigError
from paceline.policy.tokenizer import character_tokenizer, save_tokenizer
from paceline.session import open_session
from paceline.tasks.running_sums import ALPHABET
from tests.loop_helpers import make_tiny_policy, tiny_config


def test_a_tokenizer_with_tokens_that_the_policy_does_not_have(tmp_path):
    policy = make_tiny_policy(tmp_path / "policy")
    save_tokenizer(character_tokenizer(ALPHABET + "\u00e9"), policy)
    size = len(ALPHABET) + 1
    with pytest.raises(ConfigError, match=rf"policy.path = '{policy}': .* up to id {size}, and the policy's vocabulary ends at {size - 1}"):
        open_session(tiny_config(policy, tmp_path, "never"))
