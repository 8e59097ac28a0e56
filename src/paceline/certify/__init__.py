"""Tests of losslessness that run against any backend, and can fail: `paceline certify`."""
