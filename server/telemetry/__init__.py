"""What operators see: metrics, log lines, reports of requests, and traces."""
