"""What a head that learns during a run needs to resume after a restart, as named tensors."""

from collections.abc import Mapping
from dataclasses import asdict

import torch

from paceline.drafting.follower import HeadFollower
from paceline.drafting.online import OnlineDrafter
from paceline.drafting.publishing import HeadPublisher, Probation, Published, restore
from paceline.drafting.remote_online import RemoteOnlineDrafter
from paceline.drafting.when import AutoMonitor, DriftMonitor, Tally

PREFIX = "online."
# The policy's states along examples, and the weights before the newest: on the host, and never changed.
LASTING = (f"{PREFIX}states.", f"{PREFIX}before.")


def online_state(online: HeadFollower) -> dict[str, torch.Tensor]:
    """Returns what is trainable and what it is trained on; a resumed run continues as it would have.

    Of a head that learns elsewhere: the head, whether it drafts, and when it is due.
    """
    counters: dict[str, float] = {
        f"when.{online.config.when}": True,
        "due": online.due,
        "version": online.publisher.current.version,
        "share": online.publisher.current.share,
        "drafts": online.publisher.current.drafts,
        "suspect": online.publisher.suspect,
        "rollbacks": online.publisher.rollbacks,
        **_flat(asdict(online.drift), "drift."),
        **_flat(asdict(online.auto), "auto."),
        **_flat(asdict(online.probation), "probation."),
    }
    own = {f"head.{name}": p.detach() for name, p in online.head.named_parameters()}
    if not online.probation.proven:
        own |= {f"published.{name}": tensor for name, tensor in online.weights().items()}
    before = online.publisher.before
    if before is not None:
        counters |= {f"before.{key}": getattr(before, key) for key in ("version", "share", "drafts")}
        own |= {f"before.{name}": tensor for name, tensor in before.weights.items()}
    if isinstance(online, OnlineDrafter):
        counters |= {
            "steps": online.trainer.optimiser.steps,
            "slice_rows": online.learning.slice_rows,
            "token_budget": online.learning.token_budget,
            "averaged": online.average.updates,
        }
        own |= {f"average.{name}": mean for name, mean in online.average.mean.items()}
        own |= {**online.trainer.optimiser.state(), **online.buffer.state()}
    if isinstance(online, RemoteOnlineDrafter):
        counters["remote_updates"] = online.updates
    own |= {f"counter.{name}": torch.tensor(value, dtype=torch.float64) for name, value in counters.items()}
    return {f"{PREFIX}{name}": tensor for name, tensor in own.items()}


def what_is_wrong(online: HeadFollower, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Returns why these tensors are no state of this head's training; None: they are."""
    own = _below(tensors, PREFIX)
    for name, parameter in online.head.named_parameters():
        found = own.get(f"head.{name}")
        if found is None or found.shape != parameter.shape:
            shape = "missing" if found is None else tuple(found.shape)
            return f"head.{name} is {shape}, not {tuple(parameter.shape)}"
    needed = [f"counter.{name}" for name in ("due", "version")]
    if "counter.steps" in own:
        needed += ["tokens", "mask", "lengths", "temperatures"]
    missing = [name for name in needed if name not in own]
    return f"{missing[0]} is missing" if missing else None


def load_online_state(online: HeadFollower, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restores what `online_state` returned, wherever the head learned then, and publishes the head."""
    own = _below(tensors, PREFIX)
    counters = {name: tensor.item() for name, tensor in _below(own, "counter.").items()}
    head, average = _below(own, "head."), _below(own, "average.")
    online.take_head(_below(own, "published.") or average or head, int(counters["version"]))
    _watch(online.publisher, counters, _below(own, "before."))
    when = _below(counters, "when.")
    if not when or online.config.when in when:  # else the run was resumed with another one
        online.due = online.config.when == "always" or bool(counters["due"])
        online.drift = _drift(_below(counters, "drift."))
        online.auto = _auto(_below(counters, "auto."))
    if isinstance(online, RemoteOnlineDrafter) and "remote_updates" in counters:
        restore(online.head, head)
        online.updates, online.probation = counters["remote_updates"], _probation(counters)
    if not isinstance(online, OnlineDrafter):
        return
    if "steps" not in counters:
        online.warn("the eagle head learned in replicas: its optimiser and its examples begin anew")
        return
    if average:
        online.average.restart(average)
        online.average.updates = int(counters["averaged"])
        online.trainer.optimiser.load_masters(head)
        online.learning.slice_rows = int(counters["slice_rows"])
        online.learning.token_budget = int(counters["token_budget"])
    online.buffer.load_state(own)
    optimiser = online.trainer.optimiser
    if optimiser.state().keys() <= own.keys():
        optimiser.load_state(own, int(counters["steps"]))
        online.probation = _probation(counters)
    else:
        online.warn("the eagle head was trained by another optimiser: this one begins anew")
        optimiser.load_masters(head | _below(own, "master."))
        online.average.restart(optimiser.masters())


def _watch(publisher: HeadPublisher, counters: Mapping[str, float], weights: dict[str, torch.Tensor]) -> None:
    """Continues to watch the newest version beside the one before."""
    if "share" not in counters:  # of a run that began with an earlier version
        return
    current = publisher.current
    current.share, current.drafts = counters["share"], int(counters["drafts"])
    publisher.suspect = bool(counters["suspect"])
    publisher.rollbacks = int(counters["rollbacks"])
    before = _below(counters, "before.")
    if before:
        publisher.before = Published(int(before["version"]), weights, before["share"], int(before["drafts"]))


def load_early_state(online: HeadFollower, tensors: Mapping[str, torch.Tensor]) -> None:
    """Loads the head of a checkpoint that has no state of its training, or one of an earlier layout."""
    head = _below(tensors, "eagle.")
    drafting = online.publisher.current.weights
    same = all(name in head and torch.equal(head[name].cpu(), drafting[name]) for name in drafting)
    if head and not same:  # else the run's head had learned nothing
        online.take_head(head, 0)
        online.warn("the eagle head resumes from the checkpoint, its optimiser and its examples begin anew")


def _flat(counters: Mapping, prefix: str) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in counters.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _below(tensors: Mapping, prefix: str) -> dict:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _drift(counters: Mapping[str, float]) -> DriftMonitor:
    return DriftMonitor(
        counters["baseline"],
        counters["baseline_drafts"],
        int(counters["rollouts"]),
        int(counters["tried"]),
    )


def _auto(counters: Mapping[str, float]) -> AutoMonitor:
    return AutoMonitor(
        bool(counters["learning"]),
        _tally(_below(counters, "trial.")),
        _tally(_below(counters, "before.")),
        _drift(_below(counters, "drift.")),
    )


def _probation(counters: Mapping[str, float]) -> Probation:
    saved = _below(counters, "probation.")
    return Probation(bool(saved["proven"]), int(saved["next_at"]), int(saved.get("unanswered", 0)))


def _tally(counters: Mapping[str, float]) -> Tally:
    if not counters:  # of a run that began with an earlier version: a trial begins
        return Tally()
    return Tally(int(counters["count"]), counters["total"], counters["squares"])
