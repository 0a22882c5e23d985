"""Executable proofs of the table of algorithms; `oxrl algorithms --check` and the tests run them,
training never does.

`rows` proves rows, `literal` holds every gate as its paper writes it, `literal_preferences` every
other loss, `identities` worked numbers and limits of cells.
"""
