"""Measurements of taskq; figures are for comparing within one run on one machine, never a test."""
