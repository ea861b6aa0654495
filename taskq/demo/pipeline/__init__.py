"""The demonstration of an emit: a source pages through files, each has a chain of its own, and its workers are killed.

``tasks`` is the app, ``play`` runs it and kills its workers, ``report`` compares what the fan-in told with a plain loop
over the same files. Called by ``taskq demo-pipeline``.
"""
