"""What a completion of vLLM is made of: tokens by step, segments by weight version, ends, statistics."""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from paceline.policy.tokenizer import character_tokenizer
from paceline.types import FinishReason, Request, SamplingParams, Segment
from paceline.vllm_backend.backend import VllmBackend
from paceline.vllm_backend.settings import DraftSettings, VllmSettings
from tests.vllm_backend.fake_engine import FakeEngine

SETTINGS = VllmSettings(
    folder="",
    dtype="float32",
    max_positions=64,
    max_running=8,
    kv_bytes=0,
    prefill_tokens=64,
    seed=0,
    eos_token_ids=(1,),
    request_seeds=True,
    draft=DraftSettings("eagle", "eagle3", 3),
)


def backend(tokenizer: Tokenizer | None = None, **engine: int) -> VllmBackend:
    return VllmBackend(FakeEngine(**engine), SETTINGS, tokenizer)


def request(name: str, seed: int = 1, prompt: tuple[int, ...] = (5, 6), **sampling: object) -> Request:
    return Request(name, prompt, seed, SamplingParams(**({"max_tokens": 5} | sampling)))


def test_tokens_come_step_by_step_and_each_request_ends_once():
    vllm = backend()
    vllm.submit([request("a"), request("b", 2, max_tokens=3)])
    done = {completion.request.id: completion for completion in vllm.completions()}
    assert done["a"].tokens == (10, 11, 12, 13, 14) and done["b"].tokens == (20, 21, 22)
    assert done["a"].segments == (Segment(0, 5, 0),) and len(done["a"].logprobs) == 5
    assert {completion.finish_reason for completion in done.values()} == {FinishReason.LENGTH}
    assert not list(vllm.completions())


def test_update_between_tokens_starts_a_new_segment():
    vllm = backend()
    vllm.submit([request("a")])
    steps = vllm.completions()
    vllm._step()
    vllm.update_weights(7, [])
    (completion,) = steps
    assert completion.segments == (Segment(0, 2, 0), Segment(2, 5, 7))
    assert vllm.engine.loads == ["policy"]


@pytest.mark.parametrize("change", ["weights", "head", "sleep"])
def test_steps_begun_ahead_are_recorded_before_anything_changes(change):
    vllm = VllmBackend(FakeEngine(), replace(SETTINGS, sleeps=True), None)
    vllm.submit([request("a", max_tokens=8)])
    vllm._step()
    vllm.engine.ahead = 1
    match change:
        case "weights":
            vllm.update_weights(7, [])
        case "head":
            vllm.speculation.publish_drafter(1, {})
        case "sleep":
            vllm.sleep()
    assert vllm.records["a"].tokens == [10, 11, 12, 13] and len(vllm.engine.loads) == 1
    (completion,) = vllm.completions()
    assert completion.segments[0] == Segment(0, 4 if change == "weights" else 8, 0)
    assert vllm.take_stats().generated_tokens == 8


def test_head_published_while_asleep_is_loaded_on_wake():
    """Asleep its weights lie elsewhere, and what they were comes back."""
    vllm = VllmBackend(FakeEngine(), replace(SETTINGS, sleeps=True), None)
    vllm.sleep()
    for version in (1, 2):
        vllm.speculation.publish_drafter(version, {"fc": torch.tensor([version])})
    vllm.wake()
    vllm.sleep()
    vllm.wake()
    vllm.speculation.publish_drafter(3, {})
    assert vllm.engine.loads == ["sleep", "wake", "drafter", "sleep", "wake", "drafter"]


def test_aborted_request_keeps_its_tokens():
    vllm = backend()
    vllm.submit([request("a"), request("b", 2)])
    vllm._step()
    vllm.abort(["a", "unknown"])
    done = {completion.request.id: completion for completion in vllm.completions()}
    assert done["a"].finish_reason is FinishReason.ABORTED and done["a"].tokens == (10, 11)
    assert len(done["b"].tokens) == 5


def test_pause_leaves_the_rest_outstanding():
    vllm = backend()
    vllm.submit([request("a")])
    vllm.pause()
    assert not list(vllm.completions())
    vllm.resume()
    assert len(list(vllm.completions())) == 1


@pytest.mark.parametrize("per_step", [1, 4, 5])
def test_stop_text_ends_at_the_token_that_completes_it(per_step):
    """However many tokens a step adds: what came after it is dropped."""
    tokenizer = character_tokenizer("abcdefghijklmnop")
    vllm = backend(tokenizer, per_step=per_step)
    text = tokenizer.decode([10, 11, 12])
    vllm.submit([request("a", stop=(text[1:],))])
    (completion,) = vllm.completions()
    assert completion.tokens == (10, 11, 12) and completion.finish_reason is FinishReason.STOP
    assert completion.segments == (Segment(0, 3, 0),) and not vllm.engine.running


def test_submit_refuses_impossible_requests_with_the_reason():
    vllm = backend()
    vllm.submit([request("long", prompt=tuple(range(64))), request("min-p", min_p=0.1), request("a")])
    done = {completion.request.id: completion for completion in vllm.completions()}
    assert done["long"].finish_reason is FinishReason.REFUSED and "64" in done["long"].error
    assert "min_p" in done["min-p"].error
    assert done["a"].finish_reason is FinishReason.LENGTH


def test_text_logprobs_are_computed_while_requests_run():
    vllm = backend()
    vllm.submit([request("a")])
    assert vllm.text_logprobs([3, 4, 5]) == [-4.0, -5.0]
    (completion,) = vllm.completions()
    assert completion.tokens == (10, 11, 12, 13, 14)


def test_statistics_have_acceptance_by_position():
    vllm = backend()
    vllm.submit([request("a"), request("b", 2)])
    assert len(list(vllm.completions())) == 2
    stats = vllm.take_stats()
    assert stats.generated_tokens == 10 and stats.running == [2, 2, 2] and stats.strategies == ["eagle:3"] * 3
    drafts = stats.drafts["eagle"]
    assert (drafts.drafts, drafts.proposed, drafts.accepted_at) == (6, 18, [6, 0, 0])
    assert [trace.id for trace in stats.requests] == ["a", "b"]
    assert not vllm.take_stats().drafts


def test_drafter_state_has_the_published_head():
    vllm = backend()
    assert not vllm.speculation.drafter_state()
    vllm.speculation.publish_drafter(1, {"fc.weight": 1})
    assert vllm.speculation.drafter_state() == {"fc.weight": 1}
    assert vllm.engine.loads == ["drafter"] and not vllm.speculation.keeps_tokens
