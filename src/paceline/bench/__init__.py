"""Measurements: `paceline bench ...`, one file each.

Each one repeats, reports medians with their spread, and can be written as JSON.
"""
