"""The additions of rows to the loop beyond their cells, one file each; `of_rows.py` lists them.

A new feature is a class here, a name in `FEATURES` there, and its meaning in `oxrl.tables.cells`.
"""
