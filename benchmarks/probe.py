"""What the probes' command lines share: lists of numbers, a recipe with its overrides, figures as JSON."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from paceline.bench.setup import describe

MOST_ROWS = 65536  # as rollout.max_running
MOST_PROPOSALS = 15  # as rollout.speculation.tokens
MODEL_HELP = "a folder, or a named shape with random weights such as qwen3-8b"


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser that shows a module's docstring, with the option `--json`."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser


def add_recipe(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("recipe", nargs="?", default=default)
    parser.add_argument("overrides", nargs="*", help="section.key=value, such as policy.path=FOLDER")


def numbers(least: int, most: int) -> Callable[[str], list[int]]:
    """Returns the type of an option that lists whole numbers with commas."""

    def whole_numbers(text: str) -> list[int]:
        values = [int(word) for word in text.split(",")]
        if not all(least <= value <= most for value in values):
            raise argparse.ArgumentTypeError(f"{text!r}: must be from {least} to {most}, with commas between")
        return values

    return whole_numbers


def write_json(path: Path | None, how: dict[str, Any], device: torch.device, points: list[Any]) -> None:
    """Writes data classes as JSON, with how and where they were measured, where `--json` named a file."""
    if path is not None:
        figures = {**how, **describe(device), "points": [asdict(point) for point in points]}
        path.write_text(json.dumps(figures, indent=2) + "\n")
