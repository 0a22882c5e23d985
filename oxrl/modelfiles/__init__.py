"""Facts about a model that its folder tells, read without torch."""
