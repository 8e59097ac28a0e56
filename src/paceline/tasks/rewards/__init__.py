"""Scores for responses: built-in verifiers and functions of the user, kept from hurting the run."""
