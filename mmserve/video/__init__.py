"""Video sessions: frames at any time and questions about them, within limits of memory and positions."""
