"""Real pretrained models without a model hub: `paceline models`."""
