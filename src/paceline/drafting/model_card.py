"""A head's model card: what it drafts for, how much of it was accepted there, and how to serve it.

`README.md` is for people and hubs, `acceptance.json` for programs that start from the head and need to know
what to expect of it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

CARD_FILE = "README.md"
ACCEPTANCE_FILE = "acceptance.json"


@dataclass(frozen=True)
class MeasuredAcceptance:
    """What a policy accepted of a head's drafts, and where that was measured."""

    policy: str
    task: str
    temperature: float
    step: int  # of the run, 0: before any
    drafts: int
    accept_length: float  # tokens per draft, the policy's own included
    first_accepted: float  # the share of drafts whose first token was accepted
    accepted_at: tuple[float, ...] = ()  # by place, the share of drafts accepted so far; empty: not known

    def __str__(self) -> str:
        return (
            f"accept length {self.accept_length:.2f}, first token {self.first_accepted:.1%} "
            f"({self.policy}, {self.task}, temperature {self.temperature:g})"
        )


def write_card(folder: Path, first: MeasuredAcceptance | None, last: MeasuredAcceptance | None) -> None:
    """Writes the card into a head's folder; `first` is how it started, `last` the newest measurement."""
    (folder / CARD_FILE).write_text(card_text(first, last))
    if last is None:
        (folder / ACCEPTANCE_FILE).unlink(missing_ok=True)  # what another head had
        return
    measured = {"first": asdict(first or last), "last": asdict(last)}
    (folder / ACCEPTANCE_FILE).write_text(json.dumps(measured, indent=2) + "\n")


def read_acceptance(folder: Path, which: str = "last") -> MeasuredAcceptance | None:
    """Returns a folder's measurement of its head, `first` or `last`; None where nothing can be read."""
    try:
        record = json.loads((folder / ACCEPTANCE_FILE).read_text())[which]
        return MeasuredAcceptance(**(record | {"accepted_at": tuple(map(float, record["accepted_at"]))}))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def card_text(first: MeasuredAcceptance | None, last: MeasuredAcceptance | None) -> str:
    """Returns the card as Markdown with the header that hubs read."""
    whose = f" for `{last.policy}`" if last is not None else ""
    return f"""---
library_name: transformers
tags: [eagle3, speculative-decoding]
---

# EAGLE-3 head{whose}

Drafts tokens for its policy to verify; alone it generates nothing.
{_acceptance(first, last)}
Serve it with the policy it was trained with:

```python
# vLLM
LLM(policy, speculative_config={{"method": "eagle3", "model": "THIS FOLDER", "num_speculative_tokens": 3}})
```

```bash
# SGLang
python -m sglang.launch_server --model-path POLICY --speculative-algorithm EAGLE3 \\
    --speculative-draft-model-path THIS_FOLDER
```
"""


def _acceptance(first: MeasuredAcceptance | None, last: MeasuredAcceptance | None) -> str:
    if last is None:
        return "Its acceptance was not measured.\n"
    lines = [
        "",
        f"Measured in training rollouts ({last.task}, temperature {last.temperature:g}, shared noise):",
        "",
        "| step | drafts | accept length | first token accepted | drafts accepted up to each place |",
        "|---|---|---|---|---|",
    ]
    measured = [last] if first is None or first.step == last.step else [first, last]
    for one in measured:
        places = ", ".join(f"{share:.1%}" for share in one.accepted_at)
        lines.append(
            f"| {one.step} | {one.drafts} | {one.accept_length:.2f} | {one.first_accepted:.1%} | {places} |"
        )
    return "\n".join([*lines, ""])
