"""Prints the planted bugs as a table, with what catches each."""

from tests.certify.mutants import table

print(table())
