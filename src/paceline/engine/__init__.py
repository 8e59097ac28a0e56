"""The native rollout engine: scheduler, paged KV, prefix sharing, graphs, sampling, verification."""
