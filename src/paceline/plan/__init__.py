"""What a run will take of a GPU's memory, before it starts.

That is the parts, the KV pool that fits beside them, and the way out where nothing fits.
"""
