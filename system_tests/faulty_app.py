"""The application of the system tests in processes that are to be stopped at a fault point."""

from app_under_test import app

from taskq.testing import faults

__all__ = ["app"]

faults.arm_from_environment()
