"""Limits, sessions and replicas that several controllers share, through a Redis.

``store`` is the Redis, with one Lua script for each of its steps (``quota``, ``session``, ``beat``,
``leave``); ``leases`` stands between it and the policy; ``gauges`` are its Prometheus families.
"""
