"""What taskq tells about itself: log events with fields, under the logger ``taskq`` of the standard library.

Nothing here touches the application's root logger, its handlers or its levels.
"""

from taskq.telemetry.log import configure_for_terminal, get_logger

__all__ = ["configure_for_terminal", "get_logger"]
