"""The views of runs, as data: charts, tables, verdicts in words."""
