"""Runs the command line: `paceline`, and `python -m paceline`."""

import sys


def main() -> None:
    """Runs the command line; Ctrl-C while it is being imported ends it without a traceback."""
    try:
        from paceline.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit("interrupted: nothing has begun")
    run()


if __name__ == "__main__":
    main()
