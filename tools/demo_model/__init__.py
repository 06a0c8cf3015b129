"""Scripts that generate the demo model's text, train it and measure it."""
