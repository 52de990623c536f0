"""The engine of one model: its loop, the requests in progress, and how they enter, leave and end."""
