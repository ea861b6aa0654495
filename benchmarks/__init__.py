"""taskq and its peers, measured side by side in one run; figures are for comparing within that run, never a test.

``peers`` has an adapter for each system, ``harness`` runs them. ``python -m benchmarks`` is the command.
"""
