"""Policies on their way into live traffic: evidence checked, shadow, canary, full, or back.

``manager.Deployments`` does it, ``papers.Papers`` are what is handed in, and ``cli`` has the
commands, which need none of the live controller's libraries.
"""
