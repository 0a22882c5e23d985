"""Figures of evaluations and how sure they are: intervals, comparisons, contamination."""
