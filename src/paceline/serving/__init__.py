"""`paceline serve`: the engine behind OpenAI's and Anthropic's endpoints, and tokens in, tokens out.

    clients ◀──HTTP──▶ app.py ──▶ endpoints/ ──▶ service.py ──▶ engine_client.py      this process: asyncio
                                                                      ▲ frames.py
                                                                      ▼
                                                                engine_host.py ──▶ Engine   another process

One frame per engine step carries everything that all requests gained, and every HTTP request reads from its
own `Generation` when its client is ready for more: no thread per request, and nobody waits for a slow reader.
"""
