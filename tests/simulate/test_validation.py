"""The validation page: what it claims holds, and the file in docs is what the command writes."""

import re
from pathlib import Path

import pytest

from paceline.simulate.deployment import ENGINES
from paceline.simulate.hardware import load_hardware
from paceline.simulate.validation import h200, nvidia, page, projection, tlt
from paceline.simulate.validation.check import worst_error

DOCS = Path(__file__).parents[2] / "docs"


NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def same_figures(made: str, written: str) -> bool:
    """Returns whether words are equal, and numbers to what another CPU's last bits may move: two units of the
    last digit shown.
    """
    if NUMBER.sub("#", made) != NUMBER.sub("#", written):
        return False
    for ours, theirs in zip(NUMBER.findall(made), NUMBER.findall(written), strict=True):
        tolerance = 2.01 * 10.0 ** -len(theirs.partition(".")[2])
        if float(ours.replace(",", "")) != pytest.approx(
            float(theirs.replace(",", "")), abs=tolerance, rel=1e-4
        ):
            return False
    return True


def test_figures_are_compared_as_numbers():
    assert same_figures("| a1 | 3.00 ms | +0.0% |", "| a1 | 3.01 ms | -0.0% |")
    for wrong in ("| a1 | 3.10 ms | +0.0% |", "| a1 | 3.00 ms | +0.5% |", "| b1 | 3.00 ms | +0.0% |"):
        assert not same_figures("| a1 | 3.00 ms | +0.0% |", wrong)


def test_the_page_in_docs_has_the_figures_of_this_model():
    text = (DOCS / "simulator.md").read_text()
    hardware = load_hardware("h200")
    points = h200.shipped_measurements()
    sections = [
        h200.step_section(hardware, points, "paceline"),
        h200.step_section(hardware, points, "vllm"),
        h200.kernel_section(hardware, points),
    ]
    sections += [nvidia.k_sweep(), tlt.batch_table()]
    for section in sections:
        for line in page.table(section.checks):
            name = line.split("|")[1]
            candidates = [
                other for other in text.splitlines() if other.startswith("|") and other.split("|")[1] == name
            ]
            assert candidates, (
                f"write docs/simulator.md again with `paceline simulate validate --write docs`: {line}"
            )
            assert any(same_figures(line, other) for other in candidates), (line, candidates)


def test_the_projection_is_reproduced_where_it_is_said_to_hold():
    section = projection.synchronous_part()
    assert worst_error([check for check in section.checks if "whole rollout" not in check.what]) < 0.15
    assert worst_error(list(section.checks)) < 0.25
    narrow = projection.cost_of(projection.Parallelism(8, 8))
    assert projection.speedup(narrow, 64, 7) > 1.3 * projection.speedup(narrow, 4, 7), (
        "few requests wake further experts"
    )
    assert projection.speedup(narrow, 64, 7) > 1.3 * projection.speedup(narrow, 2048, 7), (
        "many make verification arithmetic"
    )


def test_the_graph_limit_is_the_term_that_the_sweep_of_draft_lengths_needs():
    import dataclasses

    without = dataclasses.replace(ENGINES["vllm"], graph_tokens=0)
    for targets in nvidia.K_SWEEP.values():
        errors = []
        for engine in (ENGINES["vllm"], without):
            _, _, predicted = nvidia.fit_k_sweep(engine, targets, tuple(targets))
            errors.append(max(abs(predicted[k] / targets[k] - 1) for k in targets))
        assert errors[0] < 0.15 and errors[0] < errors[1]


def test_arithmetic_and_context_are_the_terms_behind_the_tlt_rows_that_are_missed():
    assert tlt.BatchModel(2.0, 32000.0).worst() < 0.6 * tlt.BatchModel().worst()


@pytest.mark.slow
def test_docs_are_what_the_command_writes(tmp_path):
    page.write(tmp_path, load_hardware("h200"), h200.shipped_measurements())
    for file in tmp_path.iterdir():
        made, written = file.read_text().splitlines(), (DOCS / file.name).read_text().splitlines()
        assert len(made) == len(written), file.name
        for line, other in zip(made, written, strict=True):
            assert same_figures(line, other), (file.name, line, other)
