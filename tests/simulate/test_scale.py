"""What does not scale: transfer beyond a machine, the head, the tail of more responses."""

from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.simulate.deployment import HEAD
from paceline.simulate.questions import Flags, build
from paceline.simulate.scale import scaled

FLAGS = Flags(samples=4, lengths="lognormal:200,0.8,4,1000", k="0", max_running=64)


def at(gpus: int):
    from dataclasses import replace

    return scaled(build(replace(FLAGS, gpus=gpus, prompts=2 * gpus)))


def test_a_larger_run_waits_longer_and_its_head_does_more():
    small, large = at(4), at(32)
    assert large.replicas == 8 * small.replicas
    assert large.queue_seconds == 32 * 2 * 4 * HEAD.request_seconds == 8 * small.queue_seconds
    assert large.transfer_seconds > small.transfer_seconds > 0, "beyond a machine it is the network's"
    assert large.idle_share > small.idle_share, "a step waits for the longest of more responses"
    assert large.step_seconds > small.step_seconds


def test_the_command_says_what_is_measured_and_what_is_assumed():
    arguments = ["simulate", "scale", "--gpus", "2,4", "--prompts", "1", "--samples", "2"]
    result = CliRunner().invoke(app, [*arguments, "--lengths", "fixed:64"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "head core" in result.output and "queue" in result.output and "assumed" in result.output
