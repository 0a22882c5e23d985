"""Teachers: who is asked about what the policy sampled, and what their answers become in a step."""
