"""A completions server as a subject: any that speaks OpenAI's protocol and returns token ids and logprobs.

Requests carry the prompt's token ids and ask for those of the response, as vLLM (`return_token_ids`) and
SGLang name them. Nothing is known of the server but its answers: neither its weights nor whether it
speculates.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import torch

from paceline.backend import Backend
from paceline.certify.foreign import ForeignSubject
from paceline.certify.subject import OpenedBackend, Opening
from paceline.policy.decoder import Decoder
from paceline.stats import RolloutStats
from paceline.types import Completion, FinishReason, Precision, Request, Segment

# How servers spell a token as its id.
TOKEN_ID = "token_id:"

# Timeout of a request in seconds.
TIMEOUT = 300.0

# Attempts with a server that drops the connection.
ATTEMPTS = 5


class EndpointError(ValueError):
    """The server cannot be certified; the message is the reason."""


class Endpoint:
    """A server's address, and one request to it."""

    def __init__(self, url: str, model: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            raise EndpointError(f"--endpoint {url!r} is no address; write it as http://HOST:PORT")
        self.url = url.rstrip("/").removesuffix("/completions").removesuffix("/v1")
        self.model = model or self._first_model()

    def complete(self, request: Request) -> Completion:
        sampling = request.sampling
        answer = self._call(
            "/v1/completions",
            {
                "model": self.model,
                "prompt": list(request.prompt),
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "seed": request.seed & 0x7FFFFFFF,
                "ignore_eos": sampling.ignore_eos,
                "stop_token_ids": list(sampling.stop_token_ids),
                "logprobs": 1,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            },
        )
        return _completion(request, answer)

    def _first_model(self) -> str:
        models = self._call("/v1/models").get("data") or []
        if not models:
            raise EndpointError(f"--endpoint {self.url}: the server names no model")
        return str(models[0]["id"])

    def _call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Sends the request, retrying a few times if the server drops the connection."""
        for attempt in range(ATTEMPTS):
            answer = self._try(path, body)
            if answer is not None:
                return answer
            time.sleep(0.1 * 2**attempt)
        raise EndpointError(f"{self.url}{path} drops connections; it is asked {ATTEMPTS} times")

    def _try(self, path: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:300]
            raise EndpointError(f"{self.url}{path} answered {error.code}: {said}") from None
        except (ConnectionResetError, ConnectionAbortedError):
            return None  # it refuses further connections
        except (OSError, ValueError) as error:
            raise EndpointError(f"{self.url}{path} cannot be reached: {error}") from None


def _completion(request: Request, answer: dict[str, Any]) -> Completion:
    choice = answer["choices"][0]
    logprobs = choice.get("logprobs") or {}
    names = logprobs.get("tokens") or []
    tokens = choice.get("token_ids")
    if tokens is None and names and all(name.startswith(TOKEN_ID) for name in names):
        tokens = [int(name.removeprefix(TOKEN_ID)) for name in names]
    values = logprobs.get("token_logprobs")
    if tokens is None or values is None or len(tokens) != len(values):
        raise EndpointError(
            "the server's answer lacks token ids or their logprobs; it must know `return_token_ids` or "
            "`return_tokens_as_token_ids`, as vLLM does"
        )
    reason = FinishReason.STOP if choice.get("finish_reason") == "stop" else FinishReason.LENGTH
    segments = (Segment(0, len(tokens), 0),)
    return Completion(request, tuple(tokens), tuple(float(value) for value in values), reason, segments)


class EndpointBackend(Backend):
    """A server as a `Backend`, as far as it can be one: it only generates."""

    def __init__(self, endpoint: Endpoint, max_running: int) -> None:
        self.endpoint = endpoint
        self.pool = ThreadPoolExecutor(max_running)
        self.asked: set[Future[Completion]] = set()

    @property
    def precision(self) -> Precision:
        return Precision.BASE

    def submit(self, requests: Sequence[Request]) -> None:
        self.asked |= {self.pool.submit(self.endpoint.complete, request) for request in requests}

    def completions(self) -> Iterator[Completion]:
        for done in as_completed(list(self.asked)):
            self.asked.discard(done)
            yield done.result()

    def abort(self, request_ids: Iterable[str]) -> None:
        raise NotImplementedError("a server's requests are not aborted")

    def update_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        raise NotImplementedError("a server's weights are its own")

    def pause(self) -> None:
        self.close()  # nothing else ends what hangs

    def resume(self) -> None:
        pass

    def take_stats(self) -> RolloutStats:
        return RolloutStats()

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


class EndpointSubject(ForeignSubject):
    """A server that claims to serve the policy."""

    decode = None
    tempered_logprobs = False  # servers differ; at temperature 1 it is the same

    def __init__(self, policy: Decoder, endpoint: Endpoint, max_running: int) -> None:
        super().__init__(policy, tokens=0)
        self.name = f"endpoint {endpoint.url}"
        self.endpoint = endpoint
        self.max_running = max_running

    def open(self, opening: Opening) -> OpenedBackend:
        return OpenedBackend(EndpointBackend(self.endpoint, min(self.max_running, opening.max_running)))
