"""The worker's end: drives a backend and handles messages between its steps.

    listener thread   message ──▶ inbox, and backend.pause()
    main thread       inbox ──▶ handled, backend.resume() ──▶ completions() ──▶ each one sent

A message is handled by the thread that generates, never while a step runs, so a backend needs no locks; an
answered `ping` says that this thread is alive, not merely the process. Inbox and socket are bounded: a client
that submits faster than this end handles has to wait.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

import torch

from paceline.backend import Backend, WeightsNotFinite
from paceline.pacing.sharing import load_pacing_state, pacing_state
from paceline.pacing.strategy import Pacer
from paceline.records import plain
from paceline.worker.codec import (
    completion_message,
    read_requests,
    tensors_message,
    tensors_of,
)
from paceline.worker.readers import TransferInterrupted
from paceline.worker.receive import WeightsReceiver
from paceline.worker.training_time import TrainingTime
from paceline.worker.wire import Connection, Disconnected, Message

MAX_INBOX = 64


class Host:
    """Serves one client until it disconnects."""

    def __init__(self, backend: Backend, connection: Connection, weights: WeightsReceiver) -> None:
        self.backend = backend
        self.connection = connection
        self.weights = weights
        self.inbox: deque[Message] = deque()
        self.changed = threading.Condition()
        self.outstanding = 0
        # It is new, and the learner is changing the weights that it would read.
        self.lacks_weights = False
        self.asleep = False
        self.training = False  # idle time to train in
        self.training_time = TrainingTime()
        self._came = 0.0  # when the first message in the inbox did
        self._handlers: dict[str, Callable[[Message], Message | None]] = {
            "ping": lambda message: None,
            "submit": self._submit,
            "abort": lambda message: backend.abort(message.fields["ids"]),
            "await_weights": self._await_weights,
            "update_weights": self._update_weights,
            "fall_back": self._fall_back,
            "sleep": self._sleep,
            "wake": self._wake,
            "take_stats": lambda message: Message("done", {"stats": plain(backend.take_stats())}),
            "text_logprobs": lambda message: Message(
                "done", {"logprobs": backend.text_logprobs(message.fields["tokens"])}
            ),
            "publish_drafter": self._publish_drafter,
            "drafter_state": lambda message: tensors_message("done", backend.speculation.drafter_state()),
            "load_drafter_state": lambda message: backend.speculation.load_drafter_state(tensors_of(message)),
            "pacing": lambda message: Message("done", {"state": pacing_state(self._pacer)}),
            "load_pacing": lambda message: load_pacing_state(self._pacer, message.fields["state"]),
            "train": self._begin_training,
            "stop_training": self._stop_training,
            "trained_drafter": lambda message: tensors_message("done", backend.slice_trainer.weights()),
        }

    def serve(self) -> None:
        """Runs requests; returns when the client asks to close."""
        self.connection.send(self._description())
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            while (message := self._next_message()) is not None:
                if message.kind == "close":
                    self.backend.close()
                    return
                self._handle(message)
            if self.training:
                self._train()
                continue
            for completion in self.backend.completions():
                self.outstanding -= 1
                self.connection.send(completion_message(completion))

    def _train(self) -> None:
        """Trains until a message arrives or nothing is left to learn."""
        assert self.backend.slice_trainer is not None
        began = time.monotonic()
        self.training = self.backend.slice_trainer.slice(lambda: bool(self.inbox))
        self.training_time.note(began, time.monotonic(), self._came if self.inbox else None)

    def _listen(self) -> None:
        """Puts messages into the inbox; ends the process when the client is gone."""
        try:
            while True:
                message = self.connection.receive()
                with self.changed:
                    self.changed.wait_for(lambda: len(self.inbox) < MAX_INBOX)
                    self._came = self._came if self.inbox else time.monotonic()
                    self.inbox.append(message)
                    self.backend.pause()
                    self.changed.notify_all()
        except Disconnected:
            os._exit(0)

    def _next_message(self) -> Message | None:
        """Returns the next message; None, with the backend resumed, if there is none but work is left."""
        with self.changed:
            self.changed.wait_for(lambda: self.inbox or self._has_work)
            if not self.inbox:
                self.backend.resume()
                return None
            message = self.inbox.popleft()
            self.changed.notify_all()
            return message

    @property
    def _has_work(self) -> bool:
        return bool(self.outstanding or self.training) and not self.lacks_weights and not self.asleep

    def _handle(self, message: Message) -> None:
        try:
            answer = self._answer(message)
        except WeightsNotFinite as problem:
            answer = Message("not_finite", {"problem": str(problem)})
        except TransferInterrupted as problem:
            if not message.call:  # no caller to report to: a new worker must not continue without weights
                raise
            answer = Message("interrupted", {"problem": str(problem)})
        if message.call:
            self.connection.send(Message(answer.kind, answer.fields, answer.arrays, message.call))

    def _answer(self, message: Message) -> Message:
        handler = self._handlers.get(message.kind)
        if handler is None:
            return Message("refused", {"problem": f"a worker of this version knows no {message.kind!r}"})
        return handler(message) or Message("done")

    def _submit(self, message: Message) -> None:
        requests = read_requests(message)
        self.outstanding += len(requests)
        self.training = False  # work comes first; the caller is answered later
        self.backend.submit(requests)

    def _await_weights(self, message: Message) -> None:
        self.lacks_weights = True

    def _update_weights(self, message: Message) -> Message:
        backend, version = self.backend, message.fields["version"]
        if backend.slice_trainer is not None:
            backend.slice_trainer.note_weights(version)
        backend.update_weights(version, self.weights.read(message.fields))
        if torch.cuda.is_initialized():  # a copy under way still reads what the answer releases
            torch.cuda.synchronize()
        self.lacks_weights = False
        return self._description()

    def _publish_drafter(self, message: Message) -> None:
        tensors = tensors_of(message)
        self.backend.speculation.publish_drafter(message.fields["version"], tensors)
        if self.backend.slice_trainer is not None:
            self.backend.slice_trainer.take_head(tensors)

    def _fall_back(self, message: Message) -> Message:
        self.backend.low_precision.fall_back_to_base_precision()
        return self._description()

    def _sleep(self, message: Message) -> None:
        self.training = False
        self.asleep = True  # outstanding requests wait
        self.backend.sleep()
        if torch.cuda.is_initialized():  # the learner now owns what training and prefill used
            torch.cuda.empty_cache()

    def _wake(self, message: Message) -> None:
        self.backend.wake()
        self.asleep = False

    # -- training in idle time; a replacement with less memory has no trainer ------------------------

    def _begin_training(self, message: Message) -> None:
        self.training_time = TrainingTime()
        trainer = self.backend.slice_trainer
        if trainer is not None:
            trainer.begin(message.fields["term"])
        self.training = trainer is not None and not self.outstanding

    def _stop_training(self, message: Message) -> Message:
        self.training = False
        trainer = self.backend.slice_trainer
        learned = {name: getattr(trainer, name, 0) for name in ("tokens", "updates", "overlap")}
        return Message("done", learned | asdict(self.training_time))

    @property
    def _pacer(self) -> Pacer | None:
        return self.backend.speculation.pacer if self.backend.speculation is not None else None

    def _description(self) -> Message:
        backend = self.backend
        speculation = backend.speculation
        return Message(
            "description",
            {
                "process": os.getpid(),
                "precision": backend.precision,
                "speculates": speculation is not None,
                "keeps_tokens": speculation is None or speculation.keeps_tokens,
                "trains": backend.slice_trainer is not None,
                "low_precision": backend.low_precision is not None,
            },
        )
