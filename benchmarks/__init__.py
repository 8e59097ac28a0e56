"""What measures this project, outside its wheel: `python -m benchmarks.NAME` from the repository's root."""
