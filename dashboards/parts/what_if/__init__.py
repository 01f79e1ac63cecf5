"""What the page ``what_if`` shows."""
