"""Executable proofs of the table of algorithms; `oxrl algorithms --check` and the tests run them,
training never does.

`rows` proves rows, `literal` holds every loss as its paper writes it, `identities` worked numbers
and limits of cells.
"""
