"""Limits, sessions and replicas that several controllers share, through a Redis."""
