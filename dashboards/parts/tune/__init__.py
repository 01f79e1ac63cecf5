"""What the page ``tune`` shows."""
