"""From prompts to scored rows: requests, sampling, scoring, and what can be trained on.

Plain arguments only: nothing here reads a config.
"""
