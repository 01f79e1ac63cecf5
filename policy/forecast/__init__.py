"""Forecasters: from rates that were seen to the ``Forecasted`` events that the policy is fed.

The rest of the policy never imports them: what they say reaches it as an event, and is recorded.
"""

from policy.forecast.seasonal import Rates, Seasonal

__all__ = ["Rates", "Seasonal"]
