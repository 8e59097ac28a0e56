"""A reward for the soak's runs that score in worker processes."""


def by_length(response: str) -> float:
    return len(response) / 8
