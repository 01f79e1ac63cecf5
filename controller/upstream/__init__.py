"""The servers' side: finding them, calling them, and judging what comes back."""
