"""One learner rank in its process: handles the calls that the head makes to all ranks.

    head ──update(groups)──▶ every rank ──FSDP2 among themselves──▶ metrics
         ◀──mismatch──────── rank 0 asks before the weights move
         ──verdict─────────▶

One thread works through the messages; another sends a heartbeat every few seconds.
"""

import os
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from paceline.cluster.group_codec import mismatch_message, read_groups
from paceline.cluster.transport import make_weights
from paceline.config import Config
from paceline.learning.distributed.faults import RanksLost
from paceline.learning.distributed.group import DecidedElsewhere, join_ranks
from paceline.learning.distributed.rank_learner import RankLearner
from paceline.learning.distributed.saving import NotWritten
from paceline.learning.mismatch import Mismatch
from paceline.policy.decoder import Decoder
from paceline.worker.wire import Connection, Disconnected, Message

BEAT_SECONDS = 2.0


class Vetoed(RuntimeError):
    """The head rejected this update; nothing has changed."""


class RankHost:
    """A rank that has loaded the policy, and joins the others when given their address."""

    def __init__(self, policy: Decoder, config: Config, rank: int, count: int, device: torch.device) -> None:
        self.policy = policy
        self.config = config
        self.rank = rank
        self.count = count
        self.device = device
        self.learner: RankLearner | None = None
        self.weights: Any = None
        self.listener: socket.socket | None = None  # of the first rank, where the others connect

    def serve(self, connection: Connection) -> None:
        """Handles the head's calls until it closes; ends the process when the head is gone."""
        self.connection = connection
        connection.send(Message("hello", {"process": os.getpid()}))
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            while (message := connection.receive()).kind != "close":
                answer = self._handle(message)
                connection.send(Message(answer.kind, answer.fields, answer.arrays, message.call))
        except Disconnected:
            os._exit(0)  # other ranks may hold this one in a collective

    def _beat(self) -> None:
        try:
            while True:
                time.sleep(BEAT_SECONDS)
                self.connection.send(Message("beat"))
        except Disconnected:
            os._exit(0)

    def _handle(self, message: Message) -> Message:
        try:
            return Message("done", self._answer(message))
        except (Vetoed, DecidedElsewhere) as veto:
            return Message("vetoed", {"problem": str(veto)})
        except NotWritten as problem:
            return Message("not_written", {"problem": str(problem)})
        except RanksLost as lost:
            return Message("lost", {"problem": str(lost), "ranks": list(lost.ranks)})
        except Exception as error:
            return Message("lost", {"problem": f"{type(error).__name__}: {error}", "ranks": [self.rank]})

    def _answer(self, message: Message) -> dict[str, Any]:
        fields = message.fields
        match message.kind:
            case "address":
                self.listener = _listen()
                return {"host": self._own_address(), "port": self.listener.getsockname()[1]}
            case "join":
                self._join(fields["host"], fields["port"])
            case "update":
                metrics = self._learner.update(read_groups(message), self._ask_head)
                return {"metrics": metrics, "optimiser_steps": self._learner.learner.optimiser.steps}
            case "publish":
                return self._publish(fields["version"], fields["transport"])
            case "not_finite":
                return {"names": self._learner.not_finite()}
            case "write":
                files = self._learner.write(Path(fields["folder"]), Path(fields["tokenizer_from"]))
                return {"files": files}
            case "load":
                self._learner.load(Path(fields["folder"]))
            case "save_policy":
                self._learner.write_policy(Path(fields["folder"]), Path(fields["tokenizer_from"]))
            case "stop_rounding":
                self._learner.stop_rounding()
            case "notices":
                return {"notices": self.weights.notices(fields["workers"])}
            case "cancel":
                self.weights.cancel(fields["notice"])
            case unknown:
                raise ValueError(f"a rank of this version knows no {unknown!r}")
        return {}

    @property
    def _learner(self) -> RankLearner:
        assert self.learner is not None, "this rank has not joined the others"
        return self.learner

    def _join(self, host: str, port: int) -> None:
        seconds = self.config.cluster.collective_seconds
        group = join_ranks(host, port, self.rank, self.count, self.device, seconds, listener=self.listener)
        self.learner = RankLearner(self.policy, self.config, group, self._warn)

    def _publish(self, version: int, transport: str) -> dict[str, Any]:
        """Publishes the weights: all ranks gather, rank 0 writes them where replicas read."""
        gathered: Iterable[tuple[str, torch.Tensor]] = self._learner.exported_tensors()
        if self.rank:
            for _ in gathered:
                pass
            return {}
        if self.weights is None:
            self.weights = make_weights(transport, self._own_address(), self.device)
        if transport != "memory":  # it hands out what it is given, and a gathered tensor does not stay
            gathered = ((name, tensor.clone()) for name, tensor in gathered)
        self.weights.write(version, gathered)
        return {"notice": self.weights.notices([""])[0]} if transport != "broadcast" else {}

    def _ask_head(self, mismatch: Mismatch) -> None:
        self.connection.send(mismatch_message(mismatch))
        verdict = self.connection.receive()
        assert verdict.kind == "verdict"
        if verdict.fields["problem"]:
            raise Vetoed(verdict.fields["problem"])

    def _warn(self, text: str) -> None:
        self.connection.send(Message("warning", {"text": text}))

    def _own_address(self) -> str:
        own = self.connection.socket
        return "127.0.0.1" if own.family == socket.AF_UNIX else str(own.getsockname()[0])


def _listen() -> socket.socket:
    """Returns a socket that already listens on a free port, so that no other process can be given it."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
