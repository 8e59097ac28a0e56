"""Rollouts by vLLM, in a worker process with an environment of its own; one adapter knows vLLM's interface.

    this environment    client.py: a pool of one that starts the process and checks what it does
    vLLM's environment  bootstrap.py ──▶ worker/host.py ──▶ backend.py ──▶ adapter.py ──▶ vLLM
                                                           its worker processes: extension.py

`settings.py` is all that both read. What is imported in vLLM's environment needs torch, numpy and tokenizers.
"""
