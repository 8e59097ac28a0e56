"""A generator in a process of its own: the protocol (`wire.py`, `codec.py`), its two ends, the process.

`host.py` drives any `Backend`; `client.py` is a `Backend` that talks to it. Neither knows which generator is
hosted: the process is given a function that makes it.
"""
