"""Servers for tests: an engine in a thread, its HTTP side in another, and a small policy that reads bytes."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.drafting.base import Drafter
from paceline.engine.engine import Engine
from paceline.engine.settings import EngineSettings
from paceline.pacing.strategy import Pacer
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.serving.app import App
from paceline.serving.engine_client import EngineClient
from paceline.serving.engine_host import EngineHost
from paceline.serving.engine_process import description
from paceline.serving.limits import Limits
from paceline.serving.metrics import Metrics
from paceline.serving.server import ServerSettings, make_server
from paceline.serving.service import Service
from paceline.tasks.chat import ChatTemplate

END, BEGIN = "<|im_end|>", "<|im_start|>"
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<tool_call></tool_call><|im_end|>\n{% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{%- endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Returns a tokenizer with a token for every byte, and ChatML's marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: number for number, one in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken(BEGIN, special=True)])
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    return tokenizer


def small_policy(positions: int = 2048) -> tuple[Decoder, Tokenizer]:
    """Returns an untrained policy that ends its responses now and then."""
    tokenizer = byte_tokenizer()
    size = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id(END)
    config = DecoderConfig("llama", size, 32, 48, 2, 2, 1, 16, positions, eos_token_ids=(end,))
    return Decoder(config).initialise(0), tokenizer


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    engine: Engine
    app: App
    name: str
    stop: Callable[[], None]  # as SIGTERM does
    lose_engine: Callable[[], None]

    def wait_for_idle(self) -> None:
        """Returns when the engine has nothing to do."""
        for _ in range(3000):
            scheduler = self.engine.scheduler
            if (
                not self.engine.running
                and not scheduler.sequences
                and not self.app.service.engine.outstanding
            ):
                return
            time.sleep(0.01)
        raise AssertionError("requests are left over")


@contextmanager
def serving(
    policy: Decoder,
    tokenizer: Tokenizer,
    template: str | None = TEMPLATE,
    *,
    name: str = "tiny",
    keys: tuple[str, ...] = (),
    limits: Limits | None = None,
    drafters: Sequence[Drafter] = (),
    pacer: Pacer | None = None,
    **settings: int,
) -> Iterator[Served]:
    """Serves a policy on a free port."""
    sizes = {"max_running": 16, "kv_tokens": 16384, "keeps_prefixes": True} | settings
    engine = Engine(policy, EngineSettings(**sizes), tokenizer, drafters, pacer)
    ours, theirs = socket.socketpair()
    host = EngineHost(engine, theirs, description(engine))
    running = threading.Thread(target=host.run, daemon=True)
    running.start()
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # so that a slow reader is felt soon
    ready = threading.Event()
    parts: dict[str, Any] = {}

    async def run() -> None:
        client = EngineClient()
        await client.connect(ours)
        chat = None if template is None else ChatTemplate(template)
        service = Service(client, tokenizer, chat, name, limits or Limits(), Metrics())
        app = App(service, keys)
        server = make_server(app, ServerSettings(drain_seconds=600, limits=service.limits))
        parts.update(app=app, server=server)
        serve = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        ready.set()
        await serve
        await client.close()

    listening = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    listening.start()
    assert ready.wait(30)
    app, server = parts["app"], parts["server"]
    try:
        yield Served(
            f"http://127.0.0.1:{listener.getsockname()[1]}",
            engine,
            app,
            name,
            stop=server.stop,
            lose_engine=lambda: theirs.shutdown(socket.SHUT_RDWR),
        )
    finally:
        server.should_exit = server.force_exit = True
        listening.join(20)
        ours.close()
        running.join(20)
        assert not listening.is_alive() and not running.is_alive()


def write_folder(folder: Path, policy: Decoder, tokenizer: Tokenizer) -> Path:
    """Writes a policy as a Hugging Face folder with a chat template."""
    from paceline.policy.huggingface import save_policy

    save_policy(policy, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
