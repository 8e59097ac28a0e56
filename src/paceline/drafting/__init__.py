"""Everything that proposes tokens.

A drafter can only be fast or slow, never wrong: verification keeps what the policy samples.
"""
