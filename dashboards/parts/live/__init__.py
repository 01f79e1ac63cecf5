"""What the page ``live`` shows."""
