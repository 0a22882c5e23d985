"""Environments of episodes: agents behind a chat endpoint, adapters of other libraries, tools."""
