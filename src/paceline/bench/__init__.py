"""Measurements: `paceline bench ...`. Each one repeats, reports medians with their spread, and can be written
as JSON.
"""
