"""What people and machines see of it: metrics, spans, per-hop times, alerts."""
