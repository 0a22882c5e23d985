"""A language model as judge, behind an endpoint that speaks OpenAI's chat completions."""
