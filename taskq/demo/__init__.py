"""The demonstration: Python files are indexed by two workers, one of them is killed half-way, and nothing is lost.

``counting`` says what is counted in a file; ``tasks`` is the app whose task counts; ``stage`` runs the workers and
kills one; ``loop`` counts the same files plainly, and ``report`` compares the two. Called by ``taskq demo``.
"""
