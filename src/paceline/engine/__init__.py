"""The native rollout engine: requests, scheduler, paged KV, prefix sharing, graphs, sampling,
verification.
"""
