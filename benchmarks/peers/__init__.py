"""One adapter per queue: the same few commands, each run in a Python environment that holds that queue alone.

``kit`` has the commands and the protocol, ``bodies`` what jobs do. Those two need the standard library alone, and an
adapter its own queue besides, so it runs as ``python -m benchmarks.peers.NAME`` in the environment of that queue.
``NAME.txt`` pins the released packages that the environment is made from.
"""
