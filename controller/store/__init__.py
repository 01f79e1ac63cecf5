"""What outlives the process: the decision log, the trace, the database."""
