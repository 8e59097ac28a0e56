"""The OpenAPI description, from the schemas."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from paceline import __version__
from paceline.serving.endpoints.base import Endpoint

REFERENCE = "#/components/schemas/{model}"
REFUSALS = {
    "400": "the request cannot be served; the error names the field",
    "401": "no valid key",
    "404": "no such model",
    "405": "this path takes POST",
    "408": "the body did not arrive",
    "413": "the body is too large",
    "429": "too many requests",
    "500": "the server failed",
    "503": "the engine has ended",
    "504": "it took too long",
}


def description(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Returns the description of all endpoints."""
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = []
    for endpoint in endpoints:
        models += [(endpoint.body, "validation"), (endpoint.answer, "serialization")]
    references, definitions = models_json_schema(models, ref_template=REFERENCE)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        asked, told = references[endpoint.body, "validation"], references[endpoint.answer, "serialization"]
        paths[endpoint.path] = {
            "post": {
                "summary": endpoint.summary,
                "operationId": type(endpoint).__name__,
                "requestBody": {"required": True, "content": {"application/json": {"schema": asked}}},
                "responses": {
                    "200": {
                        "description": "the answer; with `stream` its events",
                        "content": {
                            "application/json": {"schema": told},
                            "text/event-stream": {"schema": {"type": "string"}},
                        },
                    },
                    **{status: {"description": why} for status, why in REFUSALS.items()},
                },
            }
        }
    for path, summary in (
        ("/v1/models", "The model."),
        ("/health", "Whether the engine runs."),
        ("/metrics", "Prometheus' metrics."),
    ):
        told = {"200": summary, "401": REFUSALS["401"], "405": "this path is read with GET"}
        if path == "/health":
            told["503"] = REFUSALS["503"]
        responses = {status: {"description": why} for status, why in told.items()}
        paths[path] = {"get": {"summary": summary, "responses": responses}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
