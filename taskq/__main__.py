"""``python -m taskq``, the same as the command ``taskq``."""

from taskq.cli import main

if __name__ == "__main__":
    main()
