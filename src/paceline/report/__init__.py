"""What a run leaves behind and shows: run directory, metrics, samples, console."""
