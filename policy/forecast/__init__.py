"""Forecasters: from rates that were seen to the ``Forecasted`` events that the policy is fed.

The rest of the policy never imports them: what they say reaches it as an event, and is recorded.
``Rates`` and ``Seasonal`` are here; what needs torch or scikit-learn is imported from its own file.

- ``contract``: what every forecaster keeps to; ``series``: the loads that they learn from;
- ``forecaster``: the one that is used, a ``blend`` of ``lstm``, ``boosting``, ``regression`` and
  the last value, with ``conformal`` bands;
- ``learned``, ``features``: what the learned ones share, and look at;
- ``seasonal``: numpy alone; ``baselines``: what others use;
- ``files``: a forecaster in a folder; ``events``: from quantiles to the policy's event.
"""

from policy.forecast.seasonal import Rates, Seasonal

__all__ = ["Rates", "Seasonal"]
