"""Mirrors of metrics.jsonl, best effort: one process per tracker, which can be lost.

`mirrors.py` starts and ends them from the run; `follow.py` is what such a process does; the other
files talk to one tracker each, and nothing else imports them.
"""
