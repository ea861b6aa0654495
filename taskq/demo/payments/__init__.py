"""The second demonstration: charges at a provider, by workers that are killed and frozen; none is doubled, none lost.

``provider`` is the outside world, a process of its own whose ``journal`` has all that it was asked and did, and whose
``faults`` come by a seed. ``client`` is how bodies ask it. Called by ``taskq demo-payments``, and by the system tests.
"""
