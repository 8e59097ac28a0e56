"""Which cases of a kernel the core suite takes."""

from collections.abc import Sequence

import pytest


def first(count: int, cases: Sequence) -> list:
    """Returns the cases, of which so many are for the core suite; the others are slow, and for the GPU."""
    return [
        *cases[:count],
        *(
            pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)
            for case in cases[count:]
        ),
    ]
