"""Policies on their way into live traffic: evidence checked, shadow, canary, full, or back.

``manager.Deployments`` does it, ``papers.Papers`` are what is handed in, and ``cli`` has the
commands, which need none of the live controller's libraries. ``plans`` says which stages,
``measured`` what they have shown so far, ``views`` what people see of it; ``asking`` builds a
request to deploy.
"""
