"""What the page ``forecast`` shows."""
