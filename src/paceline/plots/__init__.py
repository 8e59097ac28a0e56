"""Charts as data, and what draws them: one layer for report, dashboard, simulate and bench."""
