"""The demonstration of a workflow: orders are fulfilled while workers are killed, and what fails is undone.

``tasks`` has the workflow, ``play`` starts orders, cancels some and kills the workers, and ``report`` compares the
provider's journal and the warehouse with the runs. Called by ``taskq demo-orders``.
"""
