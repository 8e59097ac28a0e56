"""Merges what the pacers of several replicas have learned: each then starts from all of it.

Replicas run on like machines, so a time measured by one is valid for the others. Times are averaged with the
weight of their steps; counts of drafts are averaged, not added, and steps are not counted twice: merging
equal states changes nothing, so it may be done after every step.
"""

from collections.abc import Callable, Sequence
from typing import Any

from paceline.pacing.adaptive import AdaptivePacer
from paceline.pacing.strategy import Pacer

State = dict[str, Any]


def pacing_state(pacer: Pacer | None) -> State | None:
    """Returns what a pacer has learned; None for one that does not learn."""
    return pacer.state() if isinstance(pacer, AdaptivePacer) else None


def load_pacing_state(pacer: Pacer | None, state: State | None) -> None:
    """Loads what `merge_pacing` returned into a pacer; one that does not learn ignores it."""
    if isinstance(pacer, AdaptivePacer) and state is not None:
        pacer.load_state(state)


def merge_pacing(states: Sequence[State]) -> State:
    costs = [state["cost"] for state in states]
    verify = [cost["verify"] for cost in costs]
    drafters = sorted({name for state in states for name in state["acceptance"]})
    return {
        "cost": {
            "verify": {
                "estimates": _merge_times([v["estimates"] for v in verify]),
                "slope": {
                    key: sum(v["slope"][key] for v in verify) / len(verify) for key in verify[0]["slope"]
                },
                "steps_seen": max(v["steps_seen"] for v in verify),
            },
            "drafts": _merge_times([cost["drafts"] for cost in costs]),
            "switches": _merge_times([cost["switches"] for cost in costs]),
        },
        "acceptance": {
            name: _merge_counts([s["acceptance"][name] for s in states if name in s["acceptance"]])
            for name in drafters
        },
    }


def _merge_times(lists: Sequence[list[State]]) -> list[State]:
    """Averages the times of each entry, weighted by their steps."""

    def merge(own: list[State]) -> State:
        times = [entry["time"] for entry in own]
        steps = sum(time["steps"] for time in times) or 1.0
        mean = {key: sum(time[key] * time["steps"] for time in times) / steps for key in ("seconds", "load")}
        newest = {key: max(time[key] for time in times) for key in ("steps", "updated_at")}
        return own[0] | {"time": mean | newest}

    return _by_place(lists, ("time",), merge)


def _merge_counts(lists: Sequence[list[State]]) -> list[State]:
    """Averages the counts of each situation over the replicas that have been in it."""

    def merge(own: list[State]) -> State:
        return own[0] | {
            key: [sum(column) / len(own) for column in zip(*(entry[key] for entry in own), strict=True)]
            for key in ("reached", "survived")
        }

    return _by_place(lists, ("reached", "survived"), merge)


def _by_place(
    lists: Sequence[list[State]], values: tuple[str, ...], merge: Callable[[list[State]], State]
) -> list[State]:
    """Merges the entries that agree in everything but `values`."""
    places: dict[str, list[State]] = {}
    for entry in (entry for entries in lists for entry in entries):
        place = repr(sorted((key, value) for key, value in entry.items() if key not in values))
        places.setdefault(place, []).append(entry)
    return [merge(own) for own in places.values()]
