"""Long work in processes of its own: they outlive a page, a reload and the app.

``Jobs`` starts, finds and ends them, a ``Job`` is one, ``JobsError`` says why not; ``worker`` is
what runs in the process.
"""

from dashboards.jobs.store import Job, Jobs, JobsError

__all__ = ["Job", "Jobs", "JobsError"]
