"""Charts as data, and the pages that draw them: one plotting layer for report, dashboard, simulate and bench."""
