"""The tables: algorithms and preference methods as rows of named cells. Pure data; nothing
heavy.
"""
