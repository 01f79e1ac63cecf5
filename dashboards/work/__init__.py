"""What a job's process does: one module a kind, each with ``run(request, folder, tell)``."""
