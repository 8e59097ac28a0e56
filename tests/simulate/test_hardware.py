"""Hardware profiles: the shipped ones, and faults that are named with their key."""

import json
import re

import pytest

from paceline.simulate.hardware import load_hardware, shipped_profiles


def test_shipped_profiles_load_and_state_their_provenance():
    assert set(shipped_profiles()) == {"h200", "h100", "a100", "b200", "gb200"}
    parts = {"gemm_bf16", "attention", "other", "experts", "links", "training", "data_sheet"}
    for name in shipped_profiles():
        hardware = load_hardware(name)
        assert set(hardware.provenance) >= parts
        assert name == "h200" or hardware.provenance["gemm_bf16"].source == "assumed"
    faster, slower = (load_hardware(name).kernels.gemm_bf16 for name in ("b200", "h200"))
    assert faster.bandwidth > slower.bandwidth


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("kernels", "gemm_bf16", "bandwidth"), "fast", "gemm_bf16.bandwidth = 'fast': must be a number"),
        (("kernels", "gemm_bf16", "bandwidth"), 0, "gemm_bf16.bandwidth = 0: must be a number above 0"),
        (("kernels", "gemm_bf16", "launch_seconds"), -1, "must be a number 0 or more"),
        (("kernels", "gemm_bf16", "sharpness"), 0.5, "gemm_bf16.sharpness = 0.5: must be at least 1"),
        (("data_sheet", "memory_bytes"), None, "data_sheet.memory_bytes = None"),
        (("training", "utilisation"), 2, "training.utilisation = 2: a share"),
        (("links", "domain"), "8", "links.domain = '8'"),
        (("provenance",), {}, "provenance does not say where gemm_bf16 comes from"),
        (("provenance", "links", "source"), "guess", "'guess' is not a valid Source"),
        (("scaled_from",), "{file}", "leads back to where it began"),
    ],
)
def test_damaged_profile_is_named_with_its_key(tmp_path, path, value, message):
    file = tmp_path / "machine.json"
    record = json.loads(shipped_profiles()["h200"].read_text())
    node = record
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = str(file) if value == "{file}" else value
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}.*{re.escape(message)}"):
        load_hardware(str(file))


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe\x00", b"[" * 100_000])
def test_profile_that_is_no_json_object_is_named(tmp_path, content):
    file = tmp_path / "machine.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(file))} is not a hardware profile"):
        load_hardware(str(file))
