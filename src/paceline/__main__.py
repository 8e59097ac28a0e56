"""Runs the command line: `python -m paceline`."""

from paceline.cli.main import main

main()
