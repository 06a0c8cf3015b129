"""The engine itself: its thread, the requests that it is given, and the streams that it answers on."""
