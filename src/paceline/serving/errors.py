"""What a client is told when its request cannot be served, in the words of the API it called."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

# OpenAI's and Anthropic's name of an error, by status.
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


class ApiError(Exception):
    """A refusal: its HTTP status, what is wrong, and the field that it is about."""

    def __init__(self, status: int, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = field
        self.code = code

    def openai(self) -> dict[str, Any]:
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = OPENAI_TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        default = "invalid_request_error" if self.status < 500 else "api_error"
        kind = ANTHROPIC_TYPES.get(self.status, default)
        message = f"{self.field}: {self.message}" if self.field else self.message
        return {"type": "error", "error": {"type": kind, "message": message}}


def invalid(field: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, field, code)


def from_validation(error: ValidationError) -> ApiError:
    """Returns the first complaint about a body, with the field's place in it."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['msg']}")
    field = field_name(first["loc"])
    if first["type"] == "extra_forbidden":
        return invalid(field, "this server does not know this field; leave it out")
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, message[:1].lower() + message[1:], field or None)


def field_name(place: Sequence[int | str]) -> str:
    """Returns where in the body a field is: `messages[0].content`; what names a variant is left out."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in ("str", "int", "float", "list", "dict"):
            text += f".{part}" if text else part
    return text
