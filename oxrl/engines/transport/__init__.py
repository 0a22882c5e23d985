"""Ways of weights from those who train to those who sample."""
