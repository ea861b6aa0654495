"""The harness: one server, a fresh database for every measurement, the systems in turn within each round.

``environments`` makes the Python environments, ``server`` the databases, ``processes`` runs adapters and reads what
they use; ``measures`` has a module for each kind of measure; ``plan`` says what a form of the benchmark measures and
how much, ``runner`` carries it out; ``figures`` has the arithmetic, ``targets`` the ratios, ``report`` and ``plots``
show them. ``cli`` is the command.
"""
