"""``python -m taskq.cli``, the same as the command ``taskq``."""

from taskq.cli import main

main()
