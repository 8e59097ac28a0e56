"""A reward of your own: a bonus for answers that are short.

    paceline train examples/reward_function.yaml

A reward function asks for what it needs by parameter name (docs/tasks.md lists the names). Whatever else it
takes comes from `options` in the recipe. It runs in a worker process: if it raises or exceeds its time limit,
the sample gets `failed_score`, the metrics count it, and the run goes on.
"""


def brevity(response: str, truncated: bool, limit: int) -> float:
    """Returns 1 for an empty response, 0 for one of `limit` characters or more, and 0 if it was cut off."""
    if truncated:
        return 0.0
    return max(0.0, 1.0 - len(response) / limit)
