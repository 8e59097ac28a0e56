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
from dataclasses import asdict

import torch

from paceline.backend import Backend, WeightsNotFinite
from paceline.pacing.sharing import load_pacing_state, pacing_state
from paceline.pacing.strategy import Pacer
from paceline.worker.codec import (
    completion_message,
    read_requests,
    read_tensors,
    stats_record,
    tensor_arrays,
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

    def serve(self) -> None:
        """Runs requests; returns when the client asks to close."""
        self.connection.send(self._description("hello"))
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
        backend = self.backend
        fields = message.fields
        done = Message("done")
        match message.kind:
            case "submit":
                requests = read_requests(message)
                self.outstanding += len(requests)
                self.training = False  # work comes first; the caller is answered later
                backend.submit(requests)
            case "abort":
                backend.abort(fields["ids"])
            case "await_weights":
                self.lacks_weights = True
            case "update_weights":
                if backend.slice_trainer is not None:
                    backend.slice_trainer.note_weights(fields["version"])
                backend.update_weights(fields["version"], self.weights.read(fields))
                if torch.cuda.is_initialized():  # a copy under way still reads what the answer releases
                    torch.cuda.synchronize()
                self.lacks_weights = False
                return self._description("done")
            case "publish_drafter":
                tensors = read_tensors(fields["tensors"], message.arrays)
                backend.speculation.publish_drafter(fields["version"], tensors)
                if backend.slice_trainer is not None:
                    backend.slice_trainer.take_head(tensors)
            case "load_drafter_state":
                backend.speculation.load_drafter_state(read_tensors(fields["tensors"], message.arrays))
            case "drafter_state":
                names, arrays = tensor_arrays(backend.speculation.drafter_state())
                return Message("done", {"tensors": names}, arrays)
            case "train":
                self.training_time = TrainingTime()
                trainer = backend.slice_trainer  # none in a replacement with less memory
                if trainer is not None:
                    trainer.begin(fields["term"])
                self.training = trainer is not None and not self.outstanding
            case "stop_training":
                self.training = False
                trainer = backend.slice_trainer
                learned = {name: getattr(trainer, name, 0) for name in ("tokens", "updates", "overlap")}
                return Message("done", learned | asdict(self.training_time))
            case "trained_drafter":
                names, arrays = tensor_arrays(backend.slice_trainer.weights())
                return Message("done", {"tensors": names}, arrays)
            case "pacing":
                return Message("done", {"state": pacing_state(self._pacer)})
            case "load_pacing":
                load_pacing_state(self._pacer, fields["state"])
            case "take_stats":
                return Message("done", {"stats": stats_record(backend.take_stats())})
            case "fall_back":
                backend.low_precision.fall_back_to_base_precision()
                return self._description("done")
            case "text_logprobs":
                return Message("done", {"logprobs": backend.text_logprobs(fields["tokens"])})
            case "sleep":
                self.training = False
                self.asleep = True  # outstanding requests wait
                backend.sleep()
                if torch.cuda.is_initialized():  # the learner now owns what training and prefill used
                    torch.cuda.empty_cache()
            case "wake":
                backend.wake()
                self.asleep = False
            case "ping":
                pass
            case unknown:
                return Message("refused", {"problem": f"a worker of this version knows no {unknown!r}"})
        return done

    @property
    def _pacer(self) -> Pacer | None:
        return self.backend.speculation.pacer if self.backend.speculation is not None else None

    def _description(self, kind: str) -> Message:
        backend = self.backend
        speculation = backend.speculation
        return Message(
            kind,
            {
                "process": os.getpid(),
                "precision": backend.precision,
                "speculates": speculation is not None,
                "keeps_tokens": speculation is None or speculation.keeps_tokens,
                "trains": backend.slice_trainer is not None,
                "low_precision": backend.low_precision is not None,
            },
        )
