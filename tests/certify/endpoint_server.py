"""A completions server for tests: samples from a policy, exactly or trusting a drafter too much."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

import torch

from paceline.certify.oracle.truncation import distribution
from paceline.policy.attention import PackedAttention
from paceline.policy.decoder import Decoder
from paceline.types import SamplingParams


class Sampler:
    """Draws tokens; `trust` is the probability with which the most likely token is taken without asking."""

    def __init__(self, policy: Decoder, trust: float) -> None:
        self.policy = policy
        self.trust = trust
        self.known: dict[tuple, torch.Tensor] = {}
        self.lock = Lock()

    def logits(self, context: tuple[int, ...]) -> torch.Tensor:
        if context not in self.known:
            packed = PackedAttention([len(context)], self.policy.device)
            hidden = self.policy(torch.tensor(context), packed.positions_T, packed)[-1:]
            self.known[context] = self.policy.logits(hidden)
        return self.known[context]

    @torch.inference_mode()
    def complete(self, body: dict) -> dict:
        top_k = max(0, body["top_k"])
        sampling = SamplingParams(body["temperature"], top_p=body["top_p"], top_k=top_k, min_p=body["min_p"])
        tokens, logprobs = [], []
        # A request's own: in which order threads come here is luck.
        rng = random.Random(f"{body['seed']} {body['prompt']}")
        with self.lock:
            for _ in range(body["max_tokens"]):
                logits_1V = self.logits((*body["prompt"], *tokens))
                p_V = distribution(logits_1V.double(), sampling)[0]
                (token,) = rng.choices(range(len(p_V)), p_V.tolist())
                if rng.random() < self.trust:
                    token = int(p_V.argmax())
                tokens.append(token)
                logprobs.append(float(logits_1V.log_softmax(-1)[0, token]))
        names = [f"token_id:{token}" for token in tokens]
        choice = {"finish_reason": "length", "logprobs": {"tokens": names, "token_logprobs": logprobs}}
        return {"choices": [choice]}


@contextmanager
def server(policy: Decoder, trust: float = 0.0) -> Iterator[str]:
    """Serves the policy on a free port and yields its address."""
    sampler = Sampler(policy, trust)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer({"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(sampler.complete(body))

        def _answer(self, record: dict) -> None:
            text = json.dumps(record).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    httpd = Server(("127.0.0.1", 0), Handler)
    Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        httpd.server_close()
