"""What happens to a run directory between two processes: files cut, flipped, removed, replaced, added."""

import random
import shutil
from pathlib import Path

# Files whose damage only a person can make good: the run refuses, and says how.
RECIPE = "config.yaml"


def damage(run: Path, rng: random.Random) -> str:
    """Harms one thing in the directory; returns what, as `kind path`."""
    if rng.random() < 0.25:
        return rng.choice((_junk_in_metrics, _strange_samples, _strange_checkpoints, _leftovers))(run, rng)
    files = sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())
    if not files:  # a run that was killed early, and lost its recipe before
        return "nothing"
    victim = rng.choice(files)
    name = str(victim.relative_to(run))
    if name == RECIPE:
        kind = rng.choice(("cut", "empty", "remove"))
    else:
        kind = rng.choice(("cut", "empty", "remove", "flip", "junk", "folder"))
    content = bytearray(victim.read_bytes())
    if kind in ("remove", "folder"):
        victim.unlink()
        if kind == "folder" and rng.random() < 0.3:
            shutil.rmtree(victim.parent) if victim.parent != run else None
    elif kind == "cut":
        victim.write_bytes(content[: rng.randrange(len(content) or 1)])
    elif kind == "empty":
        victim.write_bytes(b"")
    elif kind == "flip" and content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        victim.write_bytes(content)
    else:
        victim.write_bytes(rng.randbytes(rng.randrange(1, 4096)))
    return f"{kind} {name}"


def _junk_in_metrics(run: Path, rng: random.Random) -> str:
    metrics = run / "metrics.jsonl"
    if not metrics.exists():
        return "nothing"
    lines = metrics.read_bytes().split(b"\n")
    junk = rng.choice(
        (b"\xff" * 20, b"[" * 100_000, b"{}", b'{"step": 1}', b'{"step": "x", "kind": 3}', b"\0" * 9)
    )
    for _ in range(rng.choice((1, 1000))):
        lines.insert(rng.randrange(len(lines)), junk)
    metrics.write_bytes(b"\n".join(lines))
    return "junk between metrics.jsonl"


def _strange_samples(run: Path, rng: random.Random) -> str:
    for name in ("step_x.jsonl", "step_9 (copy).jsonl", "step_\u00b2.jsonl"):
        (run / "samples").mkdir(exist_ok=True)
        (run / "samples" / name).write_text("?")
    return "strange samples"


def _strange_checkpoints(run: Path, rng: random.Random) -> str:
    folder = run / "checkpoints"
    for name in ("step_000099.corrupt", "step_abc", "step_000099_copy"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return "strange checkpoints"


def _leftovers(run: Path, rng: random.Random) -> str:
    for name in (".partial_step_000002", ".removed_step_000001", ".partial_best"):
        (run / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
        (run / "checkpoints" / name / "file").write_text("half")
    (run / "metrics.jsonl.tmp").write_text("half")
    return "leftovers"
