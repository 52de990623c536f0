"""Calibration of typed questions: what is asked, and what temperature and bias make the probabilities right."""
