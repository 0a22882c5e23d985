"""Mirrors of metrics.jsonl, best effort: one process per tracker, which can be lost.

`mirrors.py` starts and ends them from the run; `follow.py` is such a process, which talks to one
tracker by a module that is found by its name, such as those of `packages/oxrl_trackers`.
"""
