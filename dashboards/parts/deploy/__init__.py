"""What the page ``deploy`` shows."""
