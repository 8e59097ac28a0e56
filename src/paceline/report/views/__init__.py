"""The views of runs, as data: charts, tables, verdicts in words. Report and dashboard show the same ones."""
