"""The admin API: on a port of its own, behind a token. What operators see and may do.

``Stats`` listens to what happens, ``status_of`` puts it together, ``make_app`` serves it.
"""

from controller.admin.app import History, Sources, make_app
from controller.admin.stats import Stats
from controller.admin.status import Status, status_of
from controller.admin.token import load_token

__all__ = ["History", "Sources", "Stats", "Status", "load_token", "make_app", "status_of"]
