"""Long work in processes of its own: they outlive a page, a reload and the app."""

from dashboards.jobs.store import Job, Jobs, JobsError

__all__ = ["Job", "Jobs", "JobsError"]
