"""What people and machines see of it: metrics, spans, per-hop times, alerts.

- ``metrics``, ``tallies``: Prometheus metrics, and cheap counters for them;
- ``fairness``, ``drifts``: how evenly users are served; how far replicas are from their profiles;
- ``spans``, ``chain_traces``: OpenTelemetry spans; one trace for all steps of a chain;
- ``chains``: tells of the steps of chains;
- ``timing``: ``Server-Timing``; ``webhook``: alerts, posted.
"""
