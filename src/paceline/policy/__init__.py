"""The policy: decoder families, their Hugging Face folders, tokenizers.

One definition serves learning and rollout. `config.py` says how to add a model family.
"""
