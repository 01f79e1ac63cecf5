"""What the page ``replay`` shows."""
