"""Prints the table of docs/certify.md."""

from tests.certify.mutants import table

print(table())
