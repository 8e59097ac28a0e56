"""Which strategy to run now. Knows numbers about the batch, never the engine."""
