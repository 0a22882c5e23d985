"""Rewards that read an answer: maths, instructions, tool calls, choices, forms, a judge."""
