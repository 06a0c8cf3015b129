"""The server: HTTP in, SSE out. It speaks OpenAI's protocol and never sees a tensor."""
