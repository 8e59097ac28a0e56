"""Plans a run's GPU memory before it starts.

A plan has the parts, the KV pool that fits beside them, and suggestions where nothing fits.
"""
