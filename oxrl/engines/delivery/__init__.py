"""New weights on their way from the training engine to samplers, and proofs that they arrived."""
