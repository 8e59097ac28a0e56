"""Where a step's groups come from: sampled live or read from files; dynamic sampling; evaluation."""
