"""A model in this process, without HTTP. Between requests and the engine it uses the server's code."""
