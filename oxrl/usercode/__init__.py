"""Users' own code: found, checked, pinned and run in processes of its own.

An installed package offers what a configuration may name by entry points of the groups
`oxrl.rewards`, `oxrl.environments`, `oxrl.gates` and `oxrl.features`: the entry's name is what the
configuration says, its value `module:object` is what `path.py:object` would name, or for a reward
with options a row, `BuiltIn`. They are read only for names that the core does not know.
"""
