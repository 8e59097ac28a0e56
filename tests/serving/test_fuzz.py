"""Requests made from the OpenAPI description, right and wrong: every answer is one that it describes."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.serving.servers import serving, small_policy

schemathesis = pytest.importorskip("schemathesis")
openapi_checks = pytest.importorskip("schemathesis.specs.openapi.checks")
pytestmark = [pytest.mark.slow, pytest.mark.ci]


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_every_answer_is_described(mode):
    # A body may be right and still ask for what is not there: another model, a token beyond the vocabulary.
    excluded = [openapi_checks.positive_data_acceptance]
    with serving(*small_policy(128)) as served:
        description = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        paths = set()
        for found in description.get_all_operations():
            operation = found.ok()
            if operation.method == "get" and mode == "NEGATIVE":
                continue  # it has nothing that could be wrong
            paths.add(operation.path)

            @settings(max_examples=25, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode]))
            def ask(case):
                case.call_and_validate(excluded_checks=excluded)

            ask()
        assert {"/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"} < paths
        served.wait_for_idle()
        assert served.engine.pool.used == 0
