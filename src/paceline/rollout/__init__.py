"""Rollouts: sampling and scoring a step's groups, replaying saved ones, dynamic sampling, evaluation."""
