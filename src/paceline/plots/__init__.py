"""Charts as data, and what draws them: one layer for report, simulate and bench."""
