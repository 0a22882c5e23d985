"""What an evaluation says, and how sure it is: intervals, comparisons, contamination."""
