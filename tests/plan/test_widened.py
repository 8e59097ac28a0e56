"""A widened policy's eagle head is widened with it, and so planned at that size, though its folder is the
small policy's.
"""

import json

from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.models.source import BUILTIN_POLICY
from paceline.models.widen import named_shape, widened_config
from paceline.policy.config import read_config


def test_the_head_is_planned_at_the_widened_size():
    keys = [
        "policy.widen=1.7b",
        "rollout.speculation.drafters=[eagle]",
        "rollout.speculation.eagle_path=builtin-eagle",
        "policy.dtype=bfloat16",
    ]
    result = CliRunner().invoke(
        app, ["plan", "default", *keys, "--gpu", "H200", "--json"], catch_exceptions=False
    )
    planned = {part["name"]: part["num_bytes"] for part in json.loads(result.stdout)["parts"]}
    head = EagleHead(
        config_for(widened_config(read_config(BUILTIN_POLICY), named_shape("1.7b"))), device="meta"
    )
    weights = 2 * sum(parameter.numel() for parameter in head.parameters())
    assert weights <= planned["drafter"] < 1.2 * weights
