"""A model of how attempts are claimed, started, ended, lost and reconciled, small enough to be searched exhaustively.

- ``state``: what there is: rows, bodies, messages, the outside provider. Immutable tuples.
- ``rules``: what one transaction does to one job. The search and the replay of real records share these functions.
- ``actions``: who may do what next: every step of workers, leader, network, provider, operator and reconcile job.
- ``properties``: what must hold in every state.
- ``search``: breadth first through all states, with symmetry, shortest traces, and whether every job can still end.
- ``configs``, ``mutations``: what is searched, and the broken designs that the search must find out.
- ``replay``: whether the record of a real database is a path of the model.

Nothing here imports taskq or needs more than Python. ``python -m docs.model`` runs it; README.md beside this file says
what the model leaves out.
"""
