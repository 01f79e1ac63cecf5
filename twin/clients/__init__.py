"""Clients that react to what they are told: they wait, give up, try again, go on with a chain.

- ``Calls``, ``CallClients``: callers that do not wait for one another, but try again;
- ``Sessions``, ``SessionClients``: users in conversation, with think time;
- ``Chains``, ``ChainClients``: agents' chains within one time budget;
- ``Retries``: how often and how late again (``sender``); ``Setting``: what all clients share.
"""

from twin.clients.calls import CallClients, Calls
from twin.clients.chains import ChainClients, Chains
from twin.clients.sender import Retries
from twin.clients.sessions import SessionClients, Sessions
from twin.clients.setting import Setting

__all__ = [
    "CallClients", "Calls", "ChainClients", "Chains", "Retries", "SessionClients",
    "Sessions", "Setting",
]  # fmt: skip
