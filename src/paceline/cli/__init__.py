"""The command line: every command, and nothing else."""
