"""`oxrl report`: runs as one HTML file that asks nothing of a network."""
