"""A decoder over a paged KV cache: the cache, its memory, and the layers that read and write it.

Knows nothing of requests.
"""
