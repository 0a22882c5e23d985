"""Loading models and tokenizers, built-in tiny ones, heads on top of them."""
