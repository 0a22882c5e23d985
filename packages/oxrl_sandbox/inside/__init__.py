"""The code that runs inside a sandbox.

The standard library only, and no other module of oxRL: these files are sent into namespaces,
containers and remote machines as text (`oxrl_sandbox.bundle`).
"""
