"""What the page ``drills`` shows."""
