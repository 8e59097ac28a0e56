"""What a run writes and prints: run directory, metrics, summary, pacing page, console."""
